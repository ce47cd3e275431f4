"""The parts of a run that was changed after it finished: checked against each other and against `_SUCCESS`.

The plan says nothing of them any more: rows came and went. While a merge is under way (a kill may have stopped it
between two parts) rows must still be there once each, but the totals are those of before. A night knows rows by their
ids: in a run of nights each is there once too.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkrun.data.results.parts import PartInfo, count_ends, read_part_columns, read_part_info, read_part_schema
from bulkrun.errors import RunError
from bulkrun.job.plan.ids import IdArray, hash_ids
from bulkrun.job.plan.rows import id_texts
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update.staging import is_merging
from bulkrun.job.views.totals_found import differences

I64 = npt.NDArray[np.int64]


class UpdatedParts:
    """Checks part after part; `problems` name the file. Memory is 8 bytes for each output row, and 16 for each id of a
    run of nights."""

    def __init__(self, run: RunDir, record: RunRecord, totals: RunTotals) -> None:
        self._run, self._record, self._totals = run, record, totals
        self._schema: pa.Schema | None = None
        self._keys: list[I64] = []
        self._ids: list[IdArray] = []
        self._id_column = record.job["input"]["id"] if record.job["run"].get("incremental") else None
        self._infos: list[PartInfo] = []
        self.problems: list[str] = []

    @property
    def parts(self) -> int:
        """Parts read."""
        return len(self._infos)

    @property
    def rows(self) -> int:
        """Output rows read."""
        return sum(map(len, self._keys))

    def check(self) -> None:
        """Read everything."""
        for number, path in sorted(self._run.parts().items()):
            try:
                self._check_part(number, path, read_part_info(path))
            except RunError as error:
                self.problems.append(str(error))
        self._check_rows()
        self._check_ids()
        if not is_merging(self._run):
            self.problems += differences(self._totals, self._record, self._infos)

    def _check_part(self, number: int, path: Path, info: PartInfo) -> None:
        keys, codes, ends = [np.empty(0, np.int64)], Counter[str](), Counter[str]()
        for table in read_part_columns(path):
            keys.append(table["row"].to_numpy() * self._record.samples + table["sample"].to_numpy())
            codes.update(code for code in table["error_code"].to_pylist() if code is not None)
            ends.update(count_ends(table))
            self._ids += self._ids_of(table)
        self._infos.append(info)
        self._keys.append(np.concatenate(keys))
        self._schema = self._schema or read_part_schema(path)
        pairs = {
            "run": (self._record.run_id, info.run_id),
            "number": (number, info.shard),
            "folder": (str(self._run.root / info.folder), str(path.parent)),
            "errors": (dict(codes), info.errors),
            "cut": (ends["cut"], info.cut),
            "stopped": (ends["stopped"], info.stopped),
            "columns": (self._schema.names, read_part_schema(path).names),
            "input rows": (len(self._keys[-1]), info.input_rows * self._record.samples),
        }
        self.problems += [
            f"{path.name}: wrong {what}: {got!r} instead of {want!r}"
            for what, (want, got) in pairs.items()
            if want != got
        ]
        if info.generation > self._totals.generation and not is_merging(self._run):
            was = self._totals.generation
            self.problems.append(f"{path.name}: of generation {info.generation}, _SUCCESS of an earlier one ({was})")

    def _check_rows(self) -> None:
        """Every row with all its samples, once, and none that was never given out."""
        keys = np.sort(np.concatenate([np.empty(0, np.int64), *self._keys]))
        twice = np.unique(keys[1:][keys[1:] == keys[:-1]] // self._record.samples)
        if len(twice):
            self.problems.append(f"{self._run.root}: rows that appear twice: {len(twice)}, the first is {twice[0]}")
        rows, counts = np.unique(keys // self._record.samples, return_counts=True)
        partly = rows[counts < self._record.samples]
        if len(partly):
            self.problems.append(f"{self._run.root}: rows that lack samples: {len(partly)}, the first is {partly[0]}")
        limit = self._totals.next_row
        if limit is not None and len(rows) and rows[-1] >= limit and not is_merging(self._run):
            self.problems.append(f"{self._run.root}: row {rows[-1]} is there, but rows end before {limit}")

    def _ids_of(self, table: pa.Table) -> list[IdArray]:
        if self._id_column is None or self._id_column not in table.column_names:
            return []
        ids = hash_ids(id_texts(table[self._id_column], self._id_column), 0)
        ids["row"] = table["row"].to_numpy()[ids["row"]]
        return [ids]

    def _check_ids(self) -> None:
        """No id of two rows: what the next night does to one would be done to both."""
        if not self._ids:
            return
        ids = np.sort(np.concatenate(self._ids), order=["hash", "row"])
        first, second = ids[:-1], ids[1:]
        twice = np.flatnonzero((first["hash"] == second["hash"]) & (first["row"] != second["row"]))
        if len(twice):
            rows = f"{first['row'][twice[0]]} and {second['row'][twice[0]]}"
            self.problems.append(f"{self._run.root}: ids that two rows have: {len(twice)}, the first in rows {rows}")
