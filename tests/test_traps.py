"""The traps that other systems fell into, each as a test; those tested beside their module are listed at the end.

The names are those of the list of traps that the project keeps: what was seen, and in which system.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulkrun.cli import main
from bulkrun.errors import BulkrunError, RunError
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_totals import read_totals
from bulkrun.request import Request
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import Row, job, make_rows, oracle, results, start
from tests.job.work.test_runner import StopAfter
from tests.launch.one_process import one_process

ROOT = Path(__file__).parents[1]


def test_output_opened_with_truncate_on_restart(tmp_path: Path) -> None:
    rows, spec, out = make_rows(60), job(tmp_path / "out"), tmp_path / "out"
    start(out, rows, spec, should_stop=StopAfter(40))
    before = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.glob("part-*.parquet")}
    assert before
    start(out, rows, spec)
    after = {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.glob("part-*.parquet")}
    assert after | before == after, "what was committed is what it was"
    assert results(out) == oracle(rows, spec)


def test_ordered_writer_buffers_behind_one_long_row(tmp_path: Path) -> None:
    rows = [Row(row, f"id-{row}", (row, 7)) for row in range(80)]
    rows[0] = Row(0, "id-0", (0, 7), overrides={"max_tokens": 400, "min_tokens": 1})
    out = tmp_path / "out"
    engine = OneLongRow(4, lambda: len(list(out.glob("part-*"))) == 7)
    start(out, rows, job(out, max_tokens=8), engine=engine, shard_rows=10)
    shards = [event["shard"] for event in read_events(RunDir(out)) if event["event"] == "committed"]
    assert shards[-1] == 0 and sorted(shards[:-1]) == list(range(1, 8)), "nothing waits for the long row"


class OneLongRow(FakeEngine):
    """Row 0 runs until all that can be done without it is done, or for ten seconds alone."""

    def __init__(self, max_num_seqs: int, others_are_done: Callable[[], bool]) -> None:
        super().__init__(max_num_seqs)
        self._others_are_done = others_are_done
        self._waits_left = 1000

    def _generate(self) -> list:
        long = self._running.pop("0:0", None)
        ended = super()._generate()
        if long is not None:
            self._running["0:0"] = long
            if len(self._running) == 1 and not self._waiting and self._may_end():
                ended += super()._generate()
        return ended

    def _may_end(self) -> bool:
        if self._others_are_done() or not self._waits_left:
            return True
        self._waits_left -= 1
        time.sleep(0.01)
        return False


@pytest.mark.parametrize("stop_after", [10, 45])
def test_torn_last_line_or_empty_marker_breaks_startup(tmp_path: Path, stop_after: int) -> None:
    rows, kept = make_rows(30), tmp_path / "kept"
    start(kept, rows, job(tmp_path / "out"), should_stop=StopAfter(stop_after))
    files = [path.relative_to(kept) for path in (kept / ".bulkrun").rglob("*") if path.is_file()]
    assert {path.parts[1] for path in files} >= {"run.json", "plan", "journal", "events.jsonl"}
    for file in files:
        size = (kept / file).stat().st_size
        for length in {0, 1, size // 3, size - 1}:
            out = tmp_path / "out"
            shutil.copytree(kept, out)
            os.truncate(out / file, length)
            try:
                start(out, rows, job(out), ttl_s=0.2, heartbeat_s=0.05)
                assert results(out) == oracle(rows, job(out)), f"{file} cut to {length} bytes"
            except BulkrunError as error:
                assert str(out) in str(error), f"{file} cut to {length} bytes: {error}"
            shutil.rmtree(out)


def test_final_merge_rewritten_in_place_existence_taken_as_done(tmp_path: Path) -> None:
    rows, spec, out = make_rows(30), job(tmp_path / "out"), tmp_path / "out"
    start(out, rows, spec)
    (out / "_SUCCESS").unlink()
    os.truncate(out / "part-00001.parquet", 100)
    with pytest.raises(RunError, match=r"part-00001\.parquet: not a whole Parquet file"):
        start(out, rows, spec)
    assert read_totals(RunDir(out)) is None


def test_skipped_rows_vanish(tmp_path: Path) -> None:
    rows, spec, out = make_rows(50, error_every=4), job(tmp_path / "out"), tmp_path / "out"
    start(out, rows, spec, engine=FakeEngine(refuse=lambda request: len(request.prompt_token_ids) == 2))
    answered = results(out)
    totals = read_totals(RunDir(out))
    assert [row["row"] for row in answered] == list(range(50))
    assert totals is not None and totals.rows == totals.ok + sum(totals.errors.values()) == 50
    assert sum(row["error_code"] is not None for row in answered) == sum(totals.errors.values()) > 50 // 4


def test_per_row_exception_never_collected_endless_wait(tmp_path: Path) -> None:
    rows, spec, out = make_rows(40), job(tmp_path / "out"), tmp_path / "out"
    victim = next(row for row in rows if row.token_ids and len(row.token_ids) == 9)

    def poison(request: Request) -> bool:
        return tuple(request.prompt_token_ids) == victim.token_ids

    engine = FakeEngine(poison=poison)
    start(out, rows, spec, engine=engine, rebuild_engine=lambda adapter: FakeEngine(poison=poison))
    failed = {row["row"]: row["error_code"] for row in results(out) if row["error_code"] == "engine_error"}
    assert failed == {victim.row: "engine_error"}


def test_early_finishing_rank_crashes_the_others(tmp_path: Path) -> None:
    rows, spec, out = make_rows(90), job(tmp_path / "out"), tmp_path / "out"
    start(out, rows, spec, should_stop=lambda: True)  # the run and its plan are there
    outcomes: list[str] = []

    def work(step_s: float) -> None:
        outcomes.append(start(out, rows, spec, engine=FakeEngine(step_s=step_s)).state)

    ranks = [threading.Thread(target=work, args=(step_s,)) for step_s in (0.0, 0.004)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert outcomes == ["completed_with_errors"] * 2
    assert results(out) == oracle(rows, spec)


def test_state_rewritten_in_full_after_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = os.write

    def count(descriptor: int, data: bytes) -> int:
        written.append(len(data))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", count)

    def bytes_per_shard(shards: int) -> float:
        written.clear()
        out = tmp_path / str(shards)
        start(out, make_rows(10 * shards, error_every=0), job(out))
        return sum(written) / shards

    small, large = bytes_per_shard(5), bytes_per_shard(50)
    assert large < 1.5 * small, "what a commit writes does not grow with the run"


@pytest.mark.parametrize(
    ("good", "exit_code", "state"),
    [(0, 3, "completed_with_errors"), (3, 3, "completed_with_errors"), (4, 0, "completed")],
)
def test_status_completed_with_all_failed_and_exit_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: int, exit_code: int, state: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"text": "def f(): pass"}] * good + [{"text": None}] * (4 - good)
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("job.yaml").write_text(
        "{name: all, model: 'bundled:tiny', input: {path: rows.jsonl}, prompt: {column: text}, "
        "sampling: {max_tokens: 2}, output: {path: out}, run: {max_error_rate: 1.0}}"
    )
    with one_process():
        assert CliRunner().invoke(main, ["submit", "job.yaml"]).exit_code == exit_code
    status = json.loads(CliRunner().invoke(main, ["status", "out", "--json"]).stdout)
    assert status["state"] == (state or "completed_with_errors")
    assert (status["rows_done"], status["error_rows"]) == (4, 4 - good)


NIGHTLY = "tests/launch/runs/test_nightly.py"
ELSEWHERE = {
    "data written, progress not yet": "tests/campaigns/test_campaigns.py::test_a_power_cut_at_any_operation",
    "skip by count assumes the same input order": f"{NIGHTLY}::test_skip_by_count_a_shuffled_input",
    "hash of file paths, not contents": f"{NIGHTLY}::test_hash_of_file_paths",
    "cache key lacks model or params": f"{NIGHTLY}::test_cache_key_lacks_params",
    "cached value carries another row's id": "tests/job/work/test_samples.py::test_trap_cached_value",
    "whole-dataset fingerprint": f"{NIGHTLY}::test_whole_dataset_fingerprint",
    "failure turned into empty text": "tests/job/work/test_answers.py::test_trap_failure_turned_into_empty_text",
    "truncated JSON patched by adding a brace": "tests/job/outputs/test_parsing.py::test_truncated_json_patched",
    "null-typed column, late fields dropped": "tests/data/results/test_json_schema.py::test_null_typed_column",
    "too-long prompt doubles a row": "tests/job/plan/test_planner.py::test_bad_rows_are_rows_with_an_error",
    "retry goes to the same dead engine": "tests/executors/test_local.py::test_retry_goes_to_the_same_dead_engine",
    "all ids loaded in RAM to resume": "tests/data/test_memory.py::",
    "resume default starts a new dir silently": "tests/job/store/test_run_gate.py::test_what_results_depend_on",
    "two writers on one run": "tests/launch/runs/test_retry.py::test_two_writers_on_one_run",
    "cumulative-rate ETA": "tests/job/work/test_progress.py::test_the_eta_of_a_length_sorted_job",
}


@pytest.mark.parametrize("trap", ELSEWHERE)
def test_the_traps_tested_beside_their_modules_are_there(trap: str) -> None:
    file, _, name = ELSEWHERE[trap].partition("::")
    assert re.search(rf"^def {name or 'test_'}", (ROOT / file).read_text(), re.MULTILINE), ELSEWHERE[trap]
