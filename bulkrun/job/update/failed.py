"""Which rows of a finished run hold an error, as picks of its input. For runs whose row numbers are positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.data.inputs.subset import PICK_SCHEMA
from bulkrun.data.results.parts import read_part_columns, read_part_info
from bulkrun.job.store.run_dir import RunDir

_PICKS_PER_BATCH = 65536


def failed_rows(run: RunDir, codes: Sequence[str] = ()) -> npt.NDArray[np.int64]:
    """The rows with an error in any sample (with one of `codes`, if any are given), sorted, each once."""
    found = [np.empty(0, np.int64)]
    for _, path in sorted(run.parts().items()):
        if not _concerned(read_part_info(path).errors, codes):
            continue
        for table in read_part_columns(path, ["row", "error_code"]):
            failed = table["error_code"].is_valid()
            if codes:
                failed = pc.is_in(table["error_code"], pa.array(codes, pa.string()))
            found.append(table["row"].filter(failed).to_numpy())
    return np.unique(np.concatenate(found))


def _concerned(errors: dict[str, int], codes: Sequence[str]) -> bool:
    return bool(errors) if not codes else any(code in errors for code in codes)


def picks_of(rows: npt.NDArray[np.int64]) -> Iterator[pa.RecordBatch]:
    """Picks of these rows at their own positions; an old success of a sample stays when the new outcome is an error."""
    for begin in range(0, len(rows), _PICKS_PER_BATCH):
        some = pa.array(rows[begin : begin + _PICKS_PER_BATCH])
        columns = [some, some, pa.nulls(len(some), pa.string()), pa.array([True] * len(some))]
        yield pa.RecordBatch.from_arrays(columns, schema=PICK_SCHEMA)
