"""The input in windows of any size: every row once, and nothing that grows with the number of windows."""

from __future__ import annotations

import gc
from itertools import chain
from pathlib import Path

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.job.plan.input_stream import InputStream
from tests.job.plan.planning import write_jsonl


def chains() -> int:
    return sum(isinstance(thing, chain) for thing in gc.get_objects())


def test_windows_of_one_row_leave_no_chain_behind_them(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", [{"text": str(row)} for row in range(200)])
    with open_input(str(path)) as dataset:
        stream, at, texts, before = InputStream(dataset), Position(0, 0), list[str](), chains()
        for _ in range(150):
            (batch,) = stream.take(at, 1)
            texts += batch.rows["text"].to_pylist()
            at = batch.next
        assert chains() <= before + 3
        texts += [text for batch in stream.take(at, 1000) for text in batch.rows["text"].to_pylist()]
    assert texts == [str(row) for row in range(200)]
