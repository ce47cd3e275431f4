"""Jobs and commands on the job's own model, in this process: what a user types, and the rows that come of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from click.testing import CliRunner, Result

import bulkrun
from bulkrun.cli import main
from tests.launch.one_process import one_process, own_engine


def cli(*arguments: str, ends_with: int = 0) -> Result:
    """`bulkrun ARGUMENTS`, which must end with that exit code."""
    with one_process(own_engine):
        result = CliRunner().invoke(main, list(arguments), catch_exceptions=False)
    assert result.exit_code == ends_with, result.output
    return result


def job_of_parts(task: str, model: Path, prompt: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A job over in.jsonl whose rows have several texts or pairs; `sections` in the place of its own."""
    return {
        "name": "parts",
        "task": task,
        "model": str(model),
        "input": {"path": "in.jsonl"},
        "prompt": prompt,
        "engine": {"dtype": "float32", "max_num_batched_tokens": 48, "max_num_seqs": 3},
        "output": {"path": "out"},
        "run": {"max_error_rate": 1, "on_too_long": "truncate_right"},
        **sections,
    }


def lines_of(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def rows_of(job: dict[str, Any], key: str = "custom_id") -> dict[str, dict[str, Any]]:
    """The output rows of a job that is run now, by a column."""
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    rows = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return {row[key]: row for row in rows}
