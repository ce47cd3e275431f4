"""Metrics of a run, read back by Prometheus' own parser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.metrics import metrics_text
from bulkrun.job.views.status import RunStatus, read_status
from tests.job.small_runs import job, make_rows, start


def samples(status: RunStatus) -> dict[tuple[str, str | None], float]:
    found = {}
    for family in text_string_to_metric_families(metrics_text(status)):
        assert family.type == "gauge" and family.documentation
        for sample in family.samples:
            assert (sample.labels["run"], sample.labels["job"]) == (str(status.root), status.name)
            found[sample.name, sample.labels.get("state")] = sample.value
    return found


def test_a_finished_run(tmp_path: Path) -> None:
    start(tmp_path / "out", make_rows(30), job(tmp_path / "out"))
    status = read_status(RunDir(tmp_path / "out"))
    found = samples(status)
    assert found["bulkrun_rows", None] == found["bulkrun_rows_done", None] == 30
    assert found["bulkrun_error_rows", None] == 4 and found["bulkrun_workers", None] == 0
    assert found["bulkrun_prompt_tokens", None] == status.prompt_tokens > 0
    states = {state: value for (name, state), value in found.items() if name == "bulkrun_state"}
    assert {state for state, value in states.items() if value} == {"completed_with_errors"} and len(states) == 9
    assert ("bulkrun_remaining_seconds", None) not in found, "nobody knows it"


def test_odd_names_and_large_numbers_come_through(tmp_path: Path) -> None:
    start(tmp_path / "out", make_rows(10), job(tmp_path / "out"))
    status = read_status(RunDir(tmp_path / "out"))
    numbers = {"prompt_tokens": 123_456_789_012_345, "eta_s": 0.25, "error_rows": 0}
    found = samples(replace(status, root=Path('a "b"\\n\nc'), **numbers))
    assert found["bulkrun_error_rows", None] == 0, "a number, though it is none"
    assert (
        found["bulkrun_prompt_tokens", None] == 123_456_789_012_345 and found["bulkrun_remaining_seconds", None] == 0.25
    )
