"""Runs for tests, planned by the real planner from a small input file and answered by the fake engine."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.work.runner import RunOutcome
from tests.job import small_runs
from tests.job.fake_engine import FakeEngine
from tests.job.plan.planning import job, make_plan, write_parquet

LANGS = ["en", "de", None, "x/y", "..", "NULL", "007"]
COUNT = 140


def write_input(folder: Path) -> tuple[Path, list[dict[str, Any]]]:
    rows = [
        {"text": f"p{row}", "lang": LANGS[row % 7], "day": date(2024, 1, 1 + row % 2), "ok": row % 3 == 0, "id": row}
        for row in range(COUNT)
    ]
    names = ("text", "lang", "day", "ok", "id")
    return write_parquet(folder / "in.parquet", {name: [row[name] for row in rows] for name in names}), rows


def spec_for(path: Path, out: Path, *, run: dict[str, Any] | None = None, **output: Any) -> JobSpec:
    limits = {"checkpoint_every": 0.05, "max_error_rate": 1.0, **(run or {})}
    return job(path, output={"path": str(out), **output}, run=limits)


def submit(spec: JobSpec, *, engine: FakeEngine | None = None, **options: Any) -> RunOutcome:
    """Enter, plan and work as `bulkrun submit` does."""
    out = Path(spec.output.path)
    run, record = small_runs.enter(out, spec)
    make_plan(out, spec)
    return small_runs.make_runner(run, record, spec, engine or FakeEngine(), **options).run()
