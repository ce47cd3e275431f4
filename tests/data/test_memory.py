"""RAM stays flat however long the input is: two million rows in a process of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROWS = 2_000_000
CHUNK = 10_000

MEASURE = """
import json, re, sys, time
from pathlib import Path
from bulkrun.data.inputs.reader import open_input
def peak_mib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
start = time.perf_counter()
with open_input(sys.argv[1]) as dataset:
    early = rows = 0
    for batch in dataset.batches():
        rows += batch.rows.num_rows
        early = early or (rows > 50_000 and peak_mib())
print(json.dumps({"rows": rows, "early_mib": early, "peak_mib": peak_mib(), "seconds": time.perf_counter() - start}))
"""


def write_rows(path: Path) -> None:
    text = "some words of a prompt " * 8
    schema = pa.schema([("id", pa.int64()), ("text", pa.string()), ("score", pa.float64())])
    if path.suffix == ".parquet":
        with pq.ParquetWriter(path, schema) as writer:
            for first in range(0, ROWS, CHUNK * 10):
                ids = range(first, first + CHUNK * 10)
                columns = [list(ids), [f"{text}{number}" for number in ids], [number / 3 for number in ids]]
                writer.write_table(pa.table(columns, schema=schema))
        return
    with path.open("w") as stream:
        for first in range(0, ROWS, CHUNK):
            for number in range(first, first + CHUNK):
                row = (number, f"{text}{number}", number / 3)
                if path.suffix == ".csv":
                    stream.write(f"{row[0]},{row[1]},{row[2]}\n" if number else "id,text,score\n0,x,0\n")
                else:
                    stream.write(json.dumps({"id": row[0], "text": row[1], "score": row[2]}) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("format_", ["jsonl", "csv", "parquet"])
def test_two_million_rows_stream_through_flat_memory(tmp_path: Path, format_: str) -> None:
    path = tmp_path / f"x.{format_}"
    write_rows(path)
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    measured = json.loads(done.stdout)
    print(format_, f"{path.stat().st_size / 2**20:.0f} MiB", measured)
    assert measured["rows"] == ROWS
    assert measured["peak_mib"] < 400
    assert measured["peak_mib"] - measured["early_mib"] < 60
