"""The job that the cluster tests run with real workers, and its results: each row exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

_JOB = """\
name: cluster
model: bundled:tiny
input: {{path: {input}, id: name}}
prompt: {{template: "Summarize this Python code in one sentence:\\n{{{{ source }}}}"}}
sampling: {{max_tokens: {max_tokens}, temperature: 0, ignore_eos: true}}
output: {{path: {output}, rows_per_file: 20}}
engine: {{device: cpu, dtype: float32, max_num_seqs: 16}}
run: {{checkpoint_every: 0.5}}
"""


def write_rows(folder: Path, count: int) -> None:
    rows = [{"name": f"f{i}", "source": f"def add_{i}(a, b):\n    return a * {i} + b"} for i in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_job(folder: Path, name: str, section: str, *, max_tokens: int) -> Path:
    """A job over the rows of `write_rows` with results in `folder / name`; `section` is the executor's YAML."""
    path = folder / f"{name}.yaml"
    job = _JOB.format(input=folder / "rows.jsonl", output=folder / name, max_tokens=max_tokens)
    path.write_text(job + section)
    return path


def results(out: Path, count: int) -> list[dict[str, object]]:
    """All rows in input order; fails on one that is missing or there twice."""
    table = pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))])
    rows = sorted(table.to_pylist(), key=lambda row: row["row"])
    assert [row["row"] for row in rows] == list(range(count))
    return rows


def journals(out: Path) -> list[Path]:
    """The journals of a run that have a line: rows were finished."""
    return [path for path in (out / ".bulkrun/journal").glob("shard-*.jsonl") if path.stat().st_size]
