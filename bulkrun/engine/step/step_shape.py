"""How large a step is, and the few larger sizes that CUDA graphs are captured for.

A graph replays kernels for the sizes they were captured with. A smaller step is padded: with tokens that belong to
nobody and sequences that compute nothing. A step of decoding only is padded to a number of sequences; a mixed one to a
number of tokens, with room for as many decode sequences as there can be, so that one number is enough. Knows no
tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add
from statistics import fmean

from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.models.config.layer_weights import layer_weights
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig

_MAX_DECODE_KEYS = 2**23  # contexts of a captured step together: more is computed in several launches anyway
_MIN_MIXED_TOKENS = 32
_TOKENS_PER_CHUNK_SEQ = 16  # a mixed step has room for so few prompts that on average they are at least this long

# What decides up to which size capturing is worth it, roughly: see `max_captured_tokens`.
_LAUNCHES_PER_LAYER, _MORE_IN_FP8 = 11, 4  # each of the four products has its rows rounded first
_LAUNCH_S = 28e-6  # of one kernel from Python, Triton's included
_FLOPS = 600e12  # in bf16; twice as many in fp8


@dataclass(frozen=True, slots=True)
class StepShape:
    """Sizes of a step, padding included: decode sequences come first, then those that compute chunks of prompts."""

    num_tokens: int
    num_decode_seqs: int
    num_chunk_seqs: int
    max_query_len: int  # bounds from here on
    max_context_len: int  # of any sequence
    max_decode_keys: int  # of the decode sequences' contexts together

    @property
    def num_seqs(self) -> int:
        """Sequences of both kinds."""
        return self.num_decode_seqs + self.num_chunk_seqs

    @classmethod
    def of(cls, batch: ScheduledBatch) -> StepShape:
        """The sizes of a batch as it is."""
        decode, counts = batch.num_decode_seqs, batch.num_scheduled_tokens
        contexts = list(map(add, batch.starts, counts))
        num_chunk_seqs = len(contexts) - decode
        return cls(sum(counts), decode, num_chunk_seqs, max(counts), max(contexts), sum(contexts[:decode]))


class CapturedShapes:
    """The padded sizes of one engine, and which of them a step fits in."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, max_model_len: int) -> None:
        """For steps of at most `max_num_tokens` tokens: larger ones fit in none."""
        self._decode = _decode_sizes(min(max_num_seqs, max_num_tokens))
        self._mixed = _mixed_sizes(max_num_tokens)
        self._max_num_seqs, self._max_model_len = max_num_seqs, max_model_len

    def __iter__(self) -> Iterator[StepShape]:
        """All of them, the largest first."""
        shapes = [self._decode_shape(size) for size in self._decode] + [self._mixed_shape(size) for size in self._mixed]
        return iter(sorted(shapes, key=lambda shape: (-shape.num_tokens, -shape.num_seqs)))

    def fit(self, batch: ScheduledBatch) -> StepShape | None:
        """The smallest one with room for the batch, or None."""
        if batch.kv_copies:  # rare, and the number of copies would be one more size
            return None
        exact = StepShape.of(batch)
        sizes = self._mixed if exact.num_chunk_seqs else self._decode
        index = bisect_left(sizes, exact.num_tokens)
        if exact.num_chunk_seqs:
            index = max(index, bisect_left(sizes, exact.num_chunk_seqs * _TOKENS_PER_CHUNK_SEQ))
        if index == len(sizes):
            return None
        shape = self._mixed_shape(sizes[index]) if exact.num_chunk_seqs else self._decode_shape(sizes[index])
        return shape if exact.max_decode_keys <= shape.max_decode_keys else None

    def _decode_shape(self, num_seqs: int) -> StepShape:
        return self._shape(num_seqs, num_seqs, 0, max_query_len=1)

    def _mixed_shape(self, num_tokens: int) -> StepShape:
        num_decode_seqs, num_chunk_seqs = min(num_tokens, self._max_num_seqs), num_tokens // _TOKENS_PER_CHUNK_SEQ
        return self._shape(num_tokens, num_decode_seqs, num_chunk_seqs, max_query_len=num_tokens)

    def _shape(self, num_tokens: int, num_decode_seqs: int, num_chunk_seqs: int, *, max_query_len: int) -> StepShape:
        keys = min(num_decode_seqs * self._max_model_len, _MAX_DECODE_KEYS)
        return StepShape(num_tokens, num_decode_seqs, num_chunk_seqs, max_query_len, self._max_model_len, keys)


def max_captured_tokens(config: ModelConfig, max_num_batched_tokens: int, *, is_in_fp8: bool) -> int:
    """Up to how many tokens a step is worth a graph, at least 256 where steps get that large.

    Launching a step from Python takes as long whatever its size is. A step whose matrix products alone take twice as
    long keeps the device busy anyway, for the host is a step ahead; and in such a step padding is no longer free. So
    large models have graphs for small steps only (8 billion parameters: about 800 tokens, 2,300 in fp8), small ones
    for all.
    """
    launches, flops = (_LAUNCHES_PER_LAYER + _MORE_IN_FP8, 2 * _FLOPS) if is_in_fp8 else (_LAUNCHES_PER_LAYER, _FLOPS)
    tokens = int(2 * launches * _LAUNCH_S * flops / (2 * _weights_per_layer(config)))
    return min(max(tokens, 256), max_num_batched_tokens)


def _weights_per_layer(config: ModelConfig) -> int:
    """Weights that one token is multiplied with in a layer, on average; those of the general path have an MLP."""
    if isinstance(config, DecoderConfig):
        return int(fmean(layer_weights(config, layer) for layer in range(config.num_layers)))
    width = fmean(2 * (config.num_heads + kv.num_heads) * kv.head_dim for kv in config.layers_kv)
    return int(config.hidden_size * (width + 3 * config.intermediate_size))


def _decode_sizes(limit: int) -> list[int]:
    """1, 2, 4, 8, then eight per doubling, in steps of at least 8; the last is `limit`, where full batches are."""
    sizes = [size for size in (1, 2, 4) if size < limit]
    size = 8
    while size < limit:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return [*sizes, limit]


def _mixed_sizes(limit: int) -> list[int]:
    """Four per doubling; none where `limit` is small."""
    sizes = []
    size = _MIN_MIXED_TOKENS
    while size < limit:
        sizes.append(size)
        size += (1 << (size.bit_length() - 1)) // 4
    return [*sizes, limit] if limit >= _MIN_MIXED_TOKENS else sizes
