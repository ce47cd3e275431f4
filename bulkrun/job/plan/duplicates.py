"""What a plan says about ids that repeat: refused before anything is published, or counted and shown.

Finds the texts of a few examples; the counting itself is `ids`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from bulkrun.data.inputs.reader import Dataset
from bulkrun.errors import InputError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.ids import DuplicateIds, IdArray, find_duplicates, hash_ids, write_ids
from bulkrun.job.plan.rows import id_texts
from bulkrun.job.plan.shard_file import read_row_ids
from bulkrun.job.store.run_dir import RunDir

_FIX = "make the ids unique, or set input.on_duplicate: keep"


class DuplicateCounter:
    """Counts repeated ids of an input without a run: hashes go to files in `folder`."""

    def __init__(self, dataset: Dataset, id_column: str | None, folder: Path) -> None:
        self._dataset = dataset
        self._id_column = id_column
        self._folder = folder
        self._paths: list[Path] = []

    def add(self, ids: Sequence[IdArray]) -> None:
        """The ids of some rows, in a file of their own."""
        path = self._folder / f"ids-{len(self._paths)}"
        write_ids(path, ids)
        self._paths.append(path)

    def report(self) -> dict[str, Any]:
        """`count` of rows that repeat an id, and `examples` of those ids with their rows."""
        found = find_duplicates(self._paths)
        if self._id_column is None or not found.repeats:
            return _described(DuplicateIds(0, []), [])
        texts = self._texts(self._id_column, {rows[0] for rows in found.examples})
        return _described(found, [texts[rows[0]] for rows in found.examples])

    def _texts(self, name: str, rows: set[int]) -> dict[int, str | None]:
        batches = self._dataset.select([name]).batches(limit=max(rows) + 1)
        texts = chain.from_iterable(id_texts(batch.rows.column(name), name) for batch in batches)
        return {row: text for row, text in enumerate(texts) if row in rows}


def refuse_duplicate_ids(dataset: Dataset, spec: JobSpec, folder: Path) -> None:
    """Read the id column once, when the job wants no duplicates. Raises InputError with examples when there are any."""
    if spec.input.id is None or not (spec.input.on_duplicate == "fail" or spec.run.incremental):
        return
    name, counter, row = spec.input.id, DuplicateCounter(dataset, spec.input.id, folder), 0
    chunk: list[IdArray] = []
    for batch in dataset.select([name]).batches(limit=spec.run.limit):
        chunk.append(hash_ids(id_texts(batch.rows.column(name), name), row))
        row += batch.rows.num_rows
        if sum(map(len, chunk)) >= spec.run.window_rows:
            counter.add(chunk)
            chunk = []
    counter.add(chunk)
    found = counter.report()
    if found["count"]:
        shown = "; ".join(f"{each['id']!r} in {places_of(dataset, each['rows'])}" for each in found["examples"])
        have = "1 row has" if found["count"] == 1 else f"{found['count']} rows have"
        raise InputError(
            f"input.id: {have} an id of column {name!r} that an earlier row has: {shown}; "
            + ("run.incremental needs unique ids" if spec.run.incremental else _FIX)
        )


def places_of(dataset: Dataset, rows: Sequence[int]) -> str:
    """Rows for people: their numbers in the input, and with several files each one's file and number there."""
    if dataset.num_sources < 2 or dataset.num_sources != len(dataset.files):
        return f"rows {', '.join(map(str, rows))}"
    first, found = 0, dict[int, str]()
    for batch in dataset.batches(limit=max(rows) + 1):
        file, number = batch.position
        found |= {
            row: f"{row} ({dataset.files[file].path}, its row {number + row - first})"
            for row in rows
            if first <= row < first + batch.rows.num_rows
        }
        first += batch.rows.num_rows
    return f"rows {', '.join(found[row] for row in rows)}"


def report_duplicate_ids(run: RunDir, markers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How many rows repeat an id, and a few of those ids with their rows; all zero where there is no id column."""
    paths = run.id_files()
    found = find_duplicates(paths) if paths else DuplicateIds(0, [])
    texts = [_text_in_shards(run, markers, rows[0]) for rows in found.examples]
    return _described(found, texts)


def _described(found: DuplicateIds, texts: Sequence[str | None]) -> dict[str, Any]:
    examples = [{"id": text, "rows": rows} for text, rows in zip(texts, found.examples, strict=True)]
    return {"count": found.repeats, "examples": examples}


def _text_in_shards(run: RunDir, markers: Sequence[dict[str, Any]], row: int) -> str:
    """The id of a planned row, from the shards of its window."""
    marker = next(marker for marker in markers if row < marker["first_row"] + marker["rows"])
    for shard in range(marker["first_shard"], marker["first_shard"] + marker["shards"]):
        rows, ids = read_row_ids(run.shard(shard))
        if row in rows:
            return ids[rows.index(row)]
    raise AssertionError(f"row {row} is in no shard of window {marker['window']}")
