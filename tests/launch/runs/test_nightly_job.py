"""The shipped nightly job, two nights through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from tests.job.without_model import start_without_model

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    start_without_model(monkeypatch)
    return tmp_path


def write(folder: Path, count: int) -> None:
    body = "    # nobody has said what this is for\n    total = {0}\n    for each in items:\n        total += each\n"
    rows = [
        {
            "id": f"asyncio.f{number}",
            "module": "asyncio.queues",
            "docstring": None if number else "said",
            "source": f"def f{number}(items):\n{body.format(number)}    return total\n",
        }
        for number in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def bulkrun(command: str, *options: str) -> Result:
    changes = ["--set", "input.path=rows.jsonl", "--set", "engine.dtype=float32"]
    return CliRunner().invoke(
        main, [command, str(ROOT / "jobs/nightly.yaml"), *changes, *options], catch_exceptions=False
    )


def answers() -> dict[str, str]:
    return dict(duckdb.sql("SELECT id, response FROM 'out/nightly/*.parquet'").fetchall())


def test_the_second_night_runs_the_appended_row_and_the_third_nothing(folder: Path) -> None:
    write(folder, 5)
    assert bulkrun("submit").exit_code == 0
    first = answers()
    assert len(first) == 4
    write(folder, 6)
    planned = json.loads(bulkrun("plan", "--json").stdout)
    assert planned["changes"] == {"new": 1, "changed": 0, "failed": 0, "unchanged": 4, "vanished": 0}
    assert planned["rows"] == 1
    night = bulkrun("submit", "--json")
    assert night.exit_code == 0
    assert json.loads(night.stdout)["changes"]["new"] == 1
    second = answers()
    assert second.pop("asyncio.f5")
    assert second == first
    again = bulkrun("submit")
    assert again.exit_code == 0
    assert "loading the model" not in again.stderr
    assert bulkrun("submit", "--quiet").output == ""
