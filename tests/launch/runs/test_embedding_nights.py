"""Nights and retries of a job that embeds: each row keeps its own vector, and only what changed is embedded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bulkrun.errors import ResumeError, UsageError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update.compact import compact
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.runs.preview import check_job, plan_job
from tests.job.fake_engine import FakeEmbedder, expected_vector
from tests.launch.nights import Nights, rows_of, stop_at, whole

SETTINGS = {
    "task": "embed",
    "sampling": {},
    "prompt": {"column": "text"},
    "embedding": {"pooling": "mean", "prompt": "doc: "},
    "engine": {"max_model_len": 64},
}


@pytest.fixture
def nights(tmp_path: Path) -> Nights:
    made = Nights(tmp_path, dict(SETTINGS))
    made.make_engine = lambda: FakeEmbedder(4, refuse=made.refuse)
    return made


def vectors(nights: Nights) -> dict[str, bytes | None]:
    """id -> its vector."""
    made = {name: row["embedding"] for name, row in nights.results().items()}
    return {name: None if vector is None else np.float32(vector).tobytes() for name, vector in made.items()}


def wanted(nights: Nights, rows: list[dict[str, Any]]) -> dict[str, bytes]:
    encode = prepare(nights.spec()).tokenizer.encode_batch
    token_ids = encode([f"doc: {row['text']}" for row in rows], add_special_tokens=True)
    return {row["id"]: expected_vector(ids) for row, ids in zip(rows, token_ids, strict=True)}


def test_a_night_embeds_new_and_changed_rows_alone(nights: Nights) -> None:
    rows = rows_of(40)
    nights.write(rows)
    assert nights.submit().exit_code == 0 and vectors(nights) == wanted(nights, rows)
    rows = [*rows, {"id": "r40", "text": "another"}]
    rows[3] = {"id": "r3", "text": "changed"}
    nights.write(rows)
    done = nights.submit()
    assert nights.ran == 2 and done.changes is not None
    assert (done.changes["new"], done.changes["changed"], done.changes["unchanged"]) == (1, 1, 39)
    assert vectors(nights) == wanted(nights, rows)
    assert set(nights.results()["r3"]) == {
        *("id", "text", "row", "sample", "embedding", "prompt_tokens", "error_code", "error_message", "row_key")
    }
    whole(nights)
    assert nights.submit().worked is False and nights.ran == 0


def test_a_night_after_compact_finds_its_rows(nights: Nights) -> None:
    rows = rows_of(30)
    nights.write(rows)
    nights.submit()
    assert compact(RunDir(nights.out), grace_s=0).parts_after == 1
    nights.write([*rows, {"id": "r30", "text": "late"}])
    nights.submit()
    assert nights.ran == 1 and vectors(nights) == wanted(nights, [*rows, {"id": "r30", "text": "late"}])
    whole(nights)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [("pooling", "last", "--full-refresh"), ("normalize", False, "--full-refresh"), ("dimensions", 8, "side by side")],
)
def test_other_vectors_never_stand_beside_those_that_are_there(nights: Nights, key: str, value: Any, fix: str) -> None:
    nights.write(rows_of(10))
    nights.submit()
    changed = {**SETTINGS["embedding"], key: value}
    with pytest.raises(ResumeError, match=rf"embedding\.{key}: (?s:.*){fix}"):
        nights.submit(embedding=changed)
    if "refresh" in fix:
        nights.submit(embedding=changed, flags={"full_refresh": True})
        assert nights.ran == 10


@pytest.mark.parametrize("limit", [None, 7])
def test_vectors_of_other_settings_do_not_stay_where_their_rows_do_not_run(nights: Nights, limit: int | None) -> None:
    nights.write(rows_of(10))
    nights.submit()
    nights.write(rows_of(10 if limit else 7))
    changed = {**SETTINGS["embedding"], "pooling": "last"}
    why = "run.limit leaves unread" if limit else "the input has no more"
    with pytest.raises(ResumeError, match=rf"3 results are of rows that {why}; their vectors(?s:.*)'mean' -> 'last'"):
        nights.submit(embedding=changed, run__limit=limit, flags={"full_refresh": True})
    with pytest.raises(ResumeError, match=r"their vectors(?s:.*)engine\.load_format: None -> 'dummy'"):
        nights.submit(engine={"load_format": "dummy"}, run__limit=limit, flags={"full_refresh": True})
    nights.submit(embedding=changed, run__on_vanished="drop", flags={"full_refresh": True})
    assert len(nights.results()) == (10 if limit else 7) == nights.ran
    whole(nights)


def test_failed_rows_are_embedded_again_and_only_these(nights: Nights) -> None:
    nights.settings["run__incremental"] = False
    rows = rows_of(20)
    nights.write(rows)
    nights.refuse = lambda request: request.request_id in ("3:0", "11:0")
    assert nights.submit().exit_code == 3
    assert {name for name, vector in vectors(nights).items() if vector is None} == {"r3", "r11"}
    nights.refuse = lambda request: False
    done = nights.retry()
    assert (done.exit_code, nights.ran, done.totals.errors, done.totals.completion_tokens) == (0, 2, {}, 0)
    assert vectors(nights) == wanted(nights, rows)
    whole(nights)


def test_a_retry_may_cut_what_was_too_long_and_change_no_vector(nights: Nights) -> None:
    nights.settings["run__incremental"] = False
    nights.write([*rows_of(5), {"id": "long", "text": "word " * 200}])
    assert nights.submit().totals.errors == {"too_long": 1}
    assert "output" not in nights.results()["long"]["error_message"]
    with pytest.raises(UsageError, match=r"embedding\.pooling: a retry can change prompt"):
        nights.retry("embedding.pooling=last")
    done = nights.retry("run.on_too_long=truncate_right")
    assert done.exit_code == 0 and nights.results()["long"]["prompt_tokens"] == 64
    whole(nights)


def test_a_submit_that_was_stopped_goes_on(nights: Nights) -> None:
    nights.settings["run__incremental"] = False
    rows = rows_of(30)
    nights.write(rows)
    stop_at(nights, 14)
    with pytest.raises(KeyboardInterrupt):
        nights.submit()
    nights.refuse = lambda request: False
    assert nights.submit().exit_code == 0
    assert vectors(nights) == wanted(nights, rows)
    whole(nights)


def test_checks_and_plans_speak_of_vectors(nights: Nights) -> None:
    nights.write([*rows_of(12), {"id": "same", "text": "text 3"}])
    facts = check_job(nights.spec())
    assert facts["vectors"] == "256 numbers, pooling mean, normalized, after 'doc: '"
    assert facts["output columns"].split(", ")[2:5] == ["row", "sample", "embedding"]
    report = plan_job(nights.spec()).report
    assert (report.counters.duplicate_prompts, report.counters.expected_output_tokens) == (1, 0)
