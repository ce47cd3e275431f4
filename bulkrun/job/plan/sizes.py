"""How many bytes a row of a shard comes to: those that are planned, and those that its results will have.

A shard is committed in memory, and its results hold the row once for every sample: what goes in must be counted as what
comes out. Each row is measured by itself, so its size does not depend on the batch in which it came. Knows Arrow's
types; knows nothing of order or cutting.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.plan.index import I64

_FIXED_BYTES = 64  # row, order, offsets and validity of the columns that every shard, or every result, has
_ID_BYTES = 4
_TEXT_BYTES = 4  # of a token, about
_NUMBER_BYTES = 4 + 6  # of a vector: in the results, and as base64 in the journal, which is read whole
_KEPT_ID_BYTES = 4 + 6  # of a token in a column: in the results, and as text in the journal
_LOGPROB_BYTES = 64  # of a token and its log-probability in a journal, which is read whole; about


@dataclass(frozen=True)
class RowSizes:
    """What the job makes of a row: `samples` results, each with so many bytes for every token, or for every vector.

    `generations` is how many outputs are journaled; the bytes are for a token of the output and of the prompt.
    """

    samples: int
    generations: int
    output_token_bytes: int
    prompt_token_bytes: int
    vector_bytes: int = 0

    @classmethod
    def of(cls, sampling: SamplingSpec, dimensions: int = 0) -> RowSizes:
        """`dimensions`: the numbers that a model makes of a text: its vector, or its scores."""
        kept = _KEPT_ID_BYTES if sampling.return_token_ids else 0
        output, prompt = (kept + _entry_bytes(top) for top in (sampling.logprobs, sampling.prompt_logprobs))
        return cls(sampling.n, sampling.generations, _TEXT_BYTES + output, prompt, dimensions * _NUMBER_BYTES)

    def of_rows(self, payload: pa.Array, prompt_tokens: I64, output_tokens: I64, texts: I64) -> I64:
        """The bytes of rows with these passed-through values and so many texts; `output_tokens` of all generations, at
        most."""
        planned = _FIXED_BYTES + prompt_tokens * (_ID_BYTES + self.generations * self.prompt_token_bytes)
        kept = self.samples * (value_bytes(payload) + _FIXED_BYTES + texts * self.vector_bytes)
        sizes: I64 = planned + kept + output_tokens * self.output_token_bytes
        return sizes


def _entry_bytes(top: int | None) -> int:
    """Bytes of a token's log-probability and of those of its `top` alternatives."""
    return 0 if top is None else (1 + top) * _LOGPROB_BYTES


def value_bytes(array: pa.Array) -> I64:
    """Bytes that each entry takes in Arrow's memory, about: strings and lists by their own length."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        return value_bytes(array.dictionary_decode())
    if pa.types.is_struct(kind):
        return sum((value_bytes(child) for child in array.flatten()), np.ones(len(array), np.int64))
    if pa.types.is_map(kind):
        return value_bytes(array.cast(pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))))
    if _is_binary(kind):
        return _filled(pc.binary_length(array)) + 8
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        lengths = _filled(pc.list_value_length(array))
        until: I64 = np.concatenate([[0], np.cumsum(value_bytes(array.flatten()))])
        ends = np.cumsum(lengths)
        sizes: I64 = until[ends] - until[ends - lengths] + 8
        return sizes
    return np.full(len(array), _fixed_width(array), np.int64)


def _is_binary(kind: pa.DataType) -> bool:
    return kind in (pa.string(), pa.binary(), pa.large_string(), pa.large_binary())


def _fixed_width(array: pa.Array) -> int:
    """Bytes of an entry and its validity; a mean where the type has no width."""
    try:
        return int(array.type.bit_width) // 8 + 1
    except ValueError:
        return int(-(-array.nbytes // max(1, len(array))))


def _filled(lengths: pa.Array) -> I64:
    filled: I64 = pc.fill_null(lengths, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return filled
