"""Duplicate ids over the whole input, in bounded memory.

Ids come as 64-bit hashes with their row number and go to disk sorted, a file per window (so that a continued plan need
not read the input again); at the end the files are merged a slice of the hash range at a time. Knows no text of an id:
whoever reports a duplicate looks the row up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bulkrun.data.storage.durable import publish_new, temporary, write_file

SLICE_IDS = 4 * 2**20
MAX_EXAMPLES = 3
_ID = np.dtype([("hash", "<u8"), ("row", "<i8")])
IdArray = npt.NDArray[np.void]


class DuplicateIds(NamedTuple):
    """`repeats`: rows whose id an earlier row has. `examples`: the rows of a few such ids, the earliest first."""

    repeats: int
    examples: list[list[int]]


def hash_ids(ids: Iterable[str | None], first_row: int) -> IdArray:
    """Hash and row of each id, in order; a row without an id (None) is left out."""
    pairs = [(_hash(text), row) for row, text in enumerate(ids, first_row) if text is not None]
    return np.array(pairs, _ID)


def write_ids(path: Path, ids: Sequence[IdArray]) -> None:
    """Publish a window's ids, sorted, under a name of its own; harmless when it is there already."""
    whole = np.sort(np.concatenate(ids) if ids else np.empty(0, _ID), order=["hash", "row"])
    tmp = temporary(path)
    write_file(tmp, whole.tobytes())
    publish_new(tmp, path)


def find_duplicates(paths: Sequence[Path]) -> DuplicateIds:
    """Duplicates among the ids of all files."""
    arrays = [np.memmap(path, _ID, "r") for path in paths if path.stat().st_size]
    count = 0
    examples: list[list[int]] = []
    for ids in _slices(arrays):
        repeats = np.flatnonzero(ids["hash"][1:] == ids["hash"][:-1]) + 1
        count += len(repeats)
        starts = np.searchsorted(ids["hash"], np.unique(ids["hash"][repeats]))
        for start in starts[np.argsort(ids["row"][starts])[:MAX_EXAMPLES]]:
            end = np.searchsorted(ids["hash"], ids["hash"][start], "right")
            examples.append([int(row) for row in ids["row"][start:end][:MAX_EXAMPLES]])
        examples = sorted(examples)[:MAX_EXAMPLES]
    return DuplicateIds(count, examples)


def _slices(arrays: Sequence[IdArray]) -> Iterator[IdArray]:
    """All ids, sorted, in slices of the hash range that hold about SLICE_IDS each."""
    total = sum(len(array) for array in arrays)
    slices = -(-total // SLICE_IDS)
    borders = [np.uint64((2**64 - 1) * number // slices) for number in range(1, slices)] if slices else []
    ends = [[*np.searchsorted(array["hash"], np.array(borders, "<u8")), len(array)] for array in arrays]
    starts = [0] * len(arrays)
    for number in range(slices):
        parts = [array[starts[k] : ends[k][number]] for k, array in enumerate(arrays)]
        starts = [ends[k][number] for k in range(len(arrays))]
        yield np.sort(np.concatenate(parts), order=["hash", "row"])


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
