"""The index of a window: what ordering and cutting need of each row, in a bounded number of bytes.

Token ids come in flat, per batch, and leave as hashes: of the whole prompt (128 bits) and of its prefixes 1, 2, 4, 8...
blocks long. A hash collision can only make the order or an estimate worse: whoever merges prompts compares the ids.
All arrays are NumPy, one entry per row, in input order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 16
MAX_LEVELS = 12  # prefixes of up to 2**11 blocks = 32,768 tokens

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class WindowIndex:
    """One entry per row of the window.

    `lengths`: prompt tokens, 0 for a row with an error. `outputs`: expected output tokens of all samples. `nbytes`:
    bytes of the row in a shard and its results. `identity` [rows, 2]: rows with equal entries may be answered by one
    generation.
    `prefixes` [rows, levels + 1]: hash of the first 2**level blocks; the whole prompt's hash where it is shorter, and
    in the last column.
    """

    lengths: I64
    outputs: I64
    nbytes: I64
    identity: U64
    prefixes: U64

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def costs(self) -> I64:
        """Estimated tokens of each row: prompt and output; 0 for an error row."""
        return self.lengths + self.outputs


class IndexBuilder:
    """Collects a window's index batch by batch; `first_row` keeps rows apart that must not be merged.

    `max_levels` 0 leaves out the prefixes of prompts: what is embedded shares none.
    """

    def __init__(self, first_row: int, max_levels: int = MAX_LEVELS) -> None:
        self._next_row, self._max_levels = first_row, max_levels
        self._batches: list[WindowIndex] = []

    def add(
        self,
        tokens: npt.NDArray[np.int32],
        lengths: I64,
        outputs: I64,
        nbytes: I64,
        variants: U64,
        mergeable: npt.NDArray[np.bool_],
    ) -> None:
        """One batch: `tokens` are the prompts one after the other, `lengths` how long each is.

        `variants` tells rows apart whose prompts are equal but whose sampling is not; a row that is not `mergeable`
        (its noise is its own, or it is an error) shares its identity with no other row.
        """
        rows = len(lengths)
        starts = np.cumsum(lengths) - lengths
        sums, other_sums = prefix_sums(tokens, lengths, starts)
        whole = span(sums, starts, lengths) ^ lengths.astype(np.uint64)
        identity = np.stack([mix(whole + variants), mix(span(other_sums, starts, lengths) ^ variants)], axis=1)
        rows_as_ids = np.arange(self._next_row, self._next_row + rows, dtype=np.uint64)
        identity[~mergeable] = np.stack([mix(rows_as_ids), rows_as_ids], axis=1)[~mergeable]
        prefixes = _prefix_hashes(sums, starts, lengths, mix(whole), self._max_levels)
        self._batches.append(WindowIndex(lengths, outputs, nbytes, identity, prefixes))
        self._next_row += rows

    def finish(self) -> WindowIndex:
        """The whole window."""
        levels = max((batch.prefixes.shape[1] for batch in self._batches), default=1)
        wide = [_widened(batch.prefixes, levels) for batch in self._batches]
        return WindowIndex(
            lengths=_joined([batch.lengths for batch in self._batches], np.int64),
            outputs=_joined([batch.outputs for batch in self._batches], np.int64),
            nbytes=_joined([batch.nbytes for batch in self._batches], np.int64),
            identity=np.concatenate([batch.identity for batch in self._batches] or [np.empty((0, 2), np.uint64)]),
            prefixes=np.concatenate(wide or [np.empty((0, levels), np.uint64)]),
        )


def mix(values: U64) -> U64:
    """A 64-bit finalizer (every input bit changes every output bit), elementwise."""
    mixed = values ^ (values >> np.uint64(30))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def prefix_sums(tokens: npt.NDArray[np.int32], lengths: I64, starts: I64) -> tuple[U64, U64]:
    """Two running sums (modulo 2**64, one entry more than tokens) of each token mixed with its place in its prompt.

    The hash of a span of one prompt is the difference of two entries, so all prefixes of a prompt cost one pass.
    """
    places = np.arange(len(tokens), dtype=np.int64) - np.repeat(starts, lengths)
    keyed = (places.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + tokens.astype(np.uint64)
    once = mix(keyed)
    twice = mix(once + np.uint64(0xD1B54A32D192ED03))
    return _running_sum(once), _running_sum(twice)


def span(sums: U64, starts: I64, lengths: I64 | int) -> U64:
    """The hash of the first `lengths` tokens of the prompts that begin at `starts`."""
    hashes: U64 = sums[starts + lengths] - sums[starts]
    return hashes


def _running_sum(values: U64) -> U64:
    sums = np.zeros(len(values) + 1, np.uint64)
    np.cumsum(values, out=sums[1:])
    return sums


def _prefix_hashes(sums: U64, starts: I64, lengths: I64, whole: U64, max_levels: int) -> U64:
    longest = int(lengths.max(initial=0)) // BLOCK_TOKENS
    levels = min(max_levels, longest.bit_length())
    prefixes = np.repeat(whole[:, None], levels + 1, axis=1)
    for level in range(levels):
        tokens = BLOCK_TOKENS << level
        deep = lengths >= tokens
        prefixes[deep, level] = mix(span(sums, starts[deep], tokens) + np.uint64(level + 1))
    return prefixes


def _widened(prefixes: U64, levels: int) -> U64:
    """With more levels; prompts of this batch end before them, so the whole prompt's hash goes on."""
    missing = levels - prefixes.shape[1]
    return np.concatenate([prefixes, np.repeat(prefixes[:, -1:], missing, axis=1)], axis=1) if missing else prefixes


def _joined(arrays: list[I64], dtype: type[np.int64]) -> I64:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)
