"""A change that was frozen for so long that another host took it over: when it wakes up it changes nothing more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage.durable import write_new_json
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update import compact as compact_module
from bulkrun.job.update import merge, settle
from bulkrun.job.update.compact import _Rewrite, compact
from bulkrun.launch.runs import nightly
from tests.job.store.test_workers import ELSEWHERE
from tests.launch import one_process as in_one_process
from tests.launch.nights import Nights, rows_of, stop_at, whole

TAKEN = "another process took over while this one was frozen.*run the same command again"


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    return Nights(tmp_path)


class Takeover:
    """Another host takes the claim while this process is in `owner.name`, at its `turn`-th call."""

    def __init__(self, nights: Nights, owner: Any, name: str, turn: int = 1) -> None:
        self.run = RunDir(nights.out)
        self.owner, self.name, self.turn = owner, name, turn
        self.then: dict[str, bytes] = {}

    def __call__(self, monkeypatch: pytest.MonkeyPatch, command: Callable[[], object]) -> None:
        original, calls = getattr(self.owner, self.name), 0

        def taken_over(*args: Any, **options: Any) -> Any:
            nonlocal calls
            done = original(*args, **options)
            calls += 1
            if calls == self.turn:
                write_new_json(self.run.claims / "update.2", asdict(ELSEWHERE))
                self.then = files_of(self.run)
            return done

        with monkeypatch.context() as meanwhile, pytest.raises(RunError, match=TAKEN):
            meanwhile.setattr(self.owner, self.name, taken_over)
            command()
        assert self.then and files_of(self.run) == self.then
        for claim in self.run.claims.glob("update.*"):
            claim.unlink()


def files_of(run: RunDir) -> dict[str, bytes]:
    """The results, the record and what is staged: all that a reader or another changer goes by."""
    files = [run.success, run.run_json, run.settling, run.staged.run_json, run.staged.subset, run.staged.update]
    files += [run.staged.merging, *run.parts().values(), *run.root.parent.glob(".out.compact/_SUCCESS")]
    return {str(path): path.read_bytes() for path in files if path.exists()}


def edited_rows() -> list[dict[str, Any]]:
    """Of twenty rows three are other ones, and one is new."""
    return [{**row, "text": row["text"] + "!" * (number < 3)} for number, row in enumerate(rows_of(21))]


@pytest.mark.parametrize(
    ("owner", "name", "turn"),
    [
        (nightly, "compare", 1),  # before it is staged
        (nightly, "write_input", 1),
        (merge._Merge, "_write", 1),  # before a part of new rows
        (merge._Merge, "_write", 2),  # before a part is replaced
        (merge, "_refuse_lost_rows", 1),  # before the record is
        (merge, "sum_parts", 1),  # before _SUCCESS is
        (merge, "log_event", 1),  # before the staged run goes
    ],
    ids=["comparing", "staging", "new part", "old part", "record", "_SUCCESS", "staged"],
)
def test_a_night_that_wakes_up_late_changes_nothing_more(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, turn: int
) -> None:
    nights.write(rows_of(20))
    nights.submit()
    nights.write(rows := edited_rows())
    Takeover(nights, owner, name, turn)(monkeypatch, nights.submit)
    nights.submit()
    answers = {name: row["response"] for name, row in nights.results().items()}
    assert answers == {row["id"]: nights.expected(row["id"], row["text"]) for row in rows}
    whole(nights)


def test_a_first_run_that_is_ended_late_keeps_what_another_made_of_it(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(60))
    stop_at(nights, 30)
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    nights.refuse = lambda request: False
    nights.write(rows_of(61))
    Takeover(nights, settle, "_rows_used")(monkeypatch, nights.submit)
    assert nights.submit().totals.rows == 61
    whole(nights)


def test_a_retry_that_wakes_up_late_does_not_merge_what_is_another_changes(
    nights: Nights, monkeypatch: pytest.MonkeyPatch
) -> None:
    nights.write(rows_of(10))
    nights.refuse = lambda request: request.request_id == "3:0"
    nights.submit()
    nights.refuse = lambda request: False
    Takeover(nights, in_one_process, "read_totals")(monkeypatch, nights.retry)
    assert nights.retry().totals.errors == {} and nights.ran == 0
    whole(nights)


@pytest.mark.parametrize(("owner", "name"), [(_Rewrite, "build"), (compact_module, "log_event")])
def test_a_compact_that_wakes_up_late_leaves_both_directories_as_they_are(
    nights: Nights, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    nights.write(rows_of(20))
    nights.submit()
    before = nights.results()
    run = RunDir(nights.out)
    Takeover(nights, owner, name)(monkeypatch, lambda: compact(run, 10, grace_s=0))
    assert nights.out.with_name(".out.compact").exists()
    compact(run, 5, grace_s=0)
    assert nights.results() == before and not nights.out.with_name(".out.compact").exists()
    whole(nights)
