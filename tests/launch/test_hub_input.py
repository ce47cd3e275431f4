"""A job whose rows are a dataset of the hub, as a user runs it."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tests.hub_server import local_hub
from tests.job.without_model import without_model

JOB = Path(__file__).parent.parent.parent / "jobs" / "from_hub.yaml"


def table(**columns: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table(columns), file)
    return file.getvalue()


def test_a_dataset_is_read_once_and_a_later_commit_is_another_input(tmp_path: Path) -> None:
    first, second = ({"question": [f"{n} + 1?", f"{n} + 2?"], "answer": ["", ""]} for n in (1, 2))
    with local_hub() as hub:

        def submit(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "bulkrun", "submit", str(JOB), *arguments]
            environment = os.environ | without_model() | hub.environment(tmp_path / "home") | variables
            return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

        path = "main/test-0000{}-of-00002.parquet".format
        hub.put("openai/gsm8k", {path(0): table(**first), path(1): table(**second), "README.md": b""})
        with_sql = "input.sql=SELECT * FROM input WHERE question NOT LIKE '2 + 2%'"
        done = submit("--set", with_sql)
        assert (done.returncode, done.stdout) == (0, ""), done.stderr
        assert "completed: 3 rows" in done.stderr and "Fetching" not in done.stderr
        asked = sorted(row["question"] for row in pq.read_table(tmp_path / "out/from_hub").to_pylist())
        assert asked == ["1 + 1?", "1 + 2?", "2 + 1?"]

        assert submit("--set", with_sql, HF_HUB_OFFLINE="1").returncode == 0
        hub.put("openai/gsm8k", {path(0): table(**second), path(1): table(**second)})
        changed = submit("--set", with_sql)
        assert changed.returncode == 4 and "2 files, 1 new or changed" in changed.stderr
