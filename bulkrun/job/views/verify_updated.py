"""The parts of a run that was changed after it finished: checked against each other and against `_SUCCESS`.

The plan says nothing of them any more: rows came and went. While a merge is under way (a kill may have stopped it
between two parts) rows must still be there once each, but the totals are those of before.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkrun.data.results.parts import PartInfo, read_part_columns, read_part_info, read_part_schema
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.update.staging import is_merging
from bulkrun.job.views.totals_found import TotalsFound

I64 = npt.NDArray[np.int64]


class UpdatedParts:
    """Checks part after part; `problems` name the file. Memory is 8 bytes for each output row."""

    def __init__(self, run: RunDir, record: RunRecord, totals: RunTotals) -> None:
        self._run, self._record, self._totals = run, record, totals
        self._schema: pa.Schema | None = None
        self._keys: list[I64] = []
        self._errors: Counter[str] = Counter()
        self.problems: list[str] = []
        self.parts = 0

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
        if not is_merging(self._run):
            self._check_totals()

    def _check_part(self, number: int, path: Path, info: PartInfo) -> None:
        keys, codes = [np.empty(0, np.int64)], Counter[str]()
        for table in read_part_columns(path):
            keys.append(table["row"].to_numpy() * self._record.samples + table["sample"].to_numpy())
            codes.update(code for code in table["error_code"].to_pylist() if code is not None)
        self.parts += 1
        self._keys.append(np.concatenate(keys))
        self._errors.update(info.errors)
        self._schema = self._schema or read_part_schema(path)
        pairs = {
            "run": (self._record.run_id, info.run_id),
            "number": (number, info.shard),
            "folder": (str(self._run.root / info.folder), str(path.parent)),
            "errors": (dict(codes), info.errors),
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

    def _check_totals(self) -> None:
        rows = self.rows // self._record.samples
        found = TotalsFound(self._record.run_id, rows, self.parts, self.rows, dict(self._errors))
        self.problems += found.differences(self._totals)
