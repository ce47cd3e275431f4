"""A part with other answers for some of its rows, row group by row group: each stays where it stands.

Memory is that of one row group and of the new answers. Knows no run and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bulkrun.errors import RunError

I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
_COPIED_BYTES = 2**30


def among(values: I64, ordered: I64) -> Flags:
    """Which values are in the sorted array `ordered`."""
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    found: Flags = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return found


def keys_of(table: pa.Table, samples: int) -> I64:
    """The row and the sample of each output row, as one number."""
    keys: I64 = table["row"].to_numpy().astype(np.int64) * samples + table["sample"].to_numpy()
    return keys


@dataclass(frozen=True)
class NewAnswers:
    """The output rows that take the place of others in one part; `order` sorts them by their `keys`, which are sorted.

    `yields` says of each (in the order of the table) whether it leaves a success as it is: an error that is to replace
    errors alone.
    """

    table: pa.Table
    samples: int
    order: I64
    keys: I64
    yields: Flags

    @classmethod
    def of(cls, table: pa.Table, samples: int, keep_success: Flags) -> NewAnswers:
        """The answers of a table in any order; `keep_success`, for each of its rows: an error replaces errors alone."""
        keys = keys_of(table, samples)
        order = np.argsort(keys, kind="stable")
        return cls(table, samples, order, keys[order], keep_success & _failed(table))

    def put_into(self, groups: Iterable[pa.Table], dropped: I64) -> Iterator[pa.Table]:
        """The row groups with these answers in them, and without the `dropped` rows (sorted).

        Raises RunError at the end when an answer found no place.
        """
        placed = np.zeros(len(self.keys), np.bool_)
        for group in groups:
            keys = keys_of(group, self.samples)
            here = np.flatnonzero(among(keys, self.keys))
            which = np.searchsorted(self.keys, keys[here])
            placed[which] = True
            yield self._replaced(group, here, self.order[which], dropped)
        if not placed.all():
            row, sample = divmod(int(self.keys[np.argmin(placed)]), self.samples)
            raise RunError(f"row {row}, sample {sample}: not in the part that held it; `bulkrun verify` says more")

    def _replaced(self, group: pa.Table, here: I64, answers: I64, dropped: I64) -> pa.Table:
        """`group` with `answers` (places in the table) at the places `here`."""
        wins = _failed(group)[here] | ~self.yields[answers]
        here, answers = here[wins], answers[wins]
        places = np.arange(group.num_rows)
        places[here] = group.num_rows + np.arange(len(here))
        stays = ~among(group["row"].to_numpy(), dropped)
        return _taken(pa.concat_tables([group, _taken(self.table, answers)]), places[stays])


def _failed(table: pa.Table) -> Flags:
    failed: Flags = table["error_code"].is_valid().to_numpy()
    return failed


def _taken(table: pa.Table, places: I64) -> pa.Table:
    """The rows at these places; large ones by reference, as those with many samples may exceed what an array holds."""
    if table.nbytes <= _COPIED_BYTES:
        return table.take(pa.array(places))
    runs = np.split(places, np.flatnonzero(np.diff(places) != 1) + 1)
    return pa.concat_tables([table.slice(run[0], len(run)) for run in runs if len(run)] or [table.slice(0, 0)])
