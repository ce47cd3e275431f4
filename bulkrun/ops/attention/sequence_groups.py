"""Which sequences of a step the reference attention pads together, and where their keys lie.

A group is a rectangle: s sequences x Q queries x L keys. On a CPU groups are cut so that padding is little and the
gathered keys and values of one group stay in the processor's cache (one big rectangle is 5 to 10 times slower:
padding, and fresh pages for every gather). Elsewhere lengths are not known to the host, so there is one group for
decode and one for prefill chunks. Knows lengths and slots; knows no queries, keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.attention.plans import SequenceGroup
from bulkrun.windows import Window, first_seen

_MAX_GROUP_BYTES = 6 * 2**20  # gathered K and V of one group: about what the caches hold
_MIN_GROUP_BYTES = 2**19  # below this, launching one more group costs more than the padding it saves
_PARTS = 8  # a step smaller than the cache is still cut in so many parts, against padding


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Some sequences of a step, one row each; a group is a slice."""

    query_start: torch.Tensor  # int64 [s, 1]: first row of q
    query_len: torch.Tensor  # int64 [s, 1]
    first_key: torch.Tensor  # int64 [s, 1]: position of the first key that any query sees
    context_len: torch.Tensor  # int64 [s, 1]
    block_tables: torch.Tensor  # int64 [s, M]

    @classmethod
    def of_step(cls, meta: AttentionMetadata, sliding_window: Window | None) -> _Sequences:
        query_start, query_end = meta.cu_seqlens_q[:-1, None].long(), meta.cu_seqlens_q[1:, None].long()
        context_len = meta.context_lens_S[:, None].long()
        query_len, first_key = query_end - query_start, torch.zeros_like(context_len)
        if sliding_window is not None:
            first_key = first_seen(context_len - query_len, sliding_window).clamp_min_(0)
        return cls(query_start, query_len, first_key, context_len, meta.block_tables_SM.long())

    def __getitem__(self, rows: slice | torch.Tensor) -> _Sequences:
        return _Sequences(*(getattr(self, name)[rows] for name in self.__slots__))

    def __len__(self) -> int:
        return self.context_len.shape[0]

    @property
    def num_keys_S(self) -> torch.Tensor:
        """Keys to gather, at least one."""
        return (self.context_len - self.first_key).clamp_min_(1).flatten()


def group_sequences(
    meta: AttentionMetadata, *, block_size: int, kv_bytes: int, sliding_window: Window | None, dtype: torch.dtype
) -> list[SequenceGroup]:
    """Partition a step's sequences into groups, decode and prefill apart; `kv_bytes` is one token's K and V.

    A query at position p sees the keys from `first_seen(p, sliding_window)` to p, or [0, p] without a window.
    """
    step = _Sequences.of_step(meta, sliding_window)
    decode, chunks = step[: meta.num_decode_seqs], step[meta.num_decode_seqs :]
    num_tokens = meta.slot_mapping_T.numel()
    groups = []
    for phase, max_query_len in ((decode, 1), (chunks, meta.max_query_len)):
        for sequences in _split_by_length(phase, kv_bytes):
            lens = max_query_len, max(meta.max_context_len, 1)  # bounds, where asking the device would stall
            if sequences.context_len.device.type == "cpu":
                lens = max(int(sequences.query_len.max()), 1), int(sequences.num_keys_S.max())
            groups.append(_make_group(sequences, lens, num_tokens, block_size, sliding_window, dtype))
    return groups


def _split_by_length(phase: _Sequences, kv_bytes: int) -> list[_Sequences]:
    """Groups of similar length and cache-sized volume; one group where the host knows no lengths."""
    if phase.context_len.device.type != "cpu" or len(phase) <= 1:
        return [phase] if len(phase) else []
    queries, keys = phase.query_len.flatten(), phase.num_keys_S
    length_class = torch.zeros_like(keys)
    if int(queries.max()) > 1:  # two lengths to pad: only sequences alike in both, to a factor of two, share a group
        length_class = 64 * _ceil_log2(queries) + _ceil_log2(keys)
    order = torch.argsort(length_class * 2**32 + keys)
    num_bytes = keys[order] * kv_bytes
    bytes_before = num_bytes.cumsum(0) - num_bytes
    group_bytes = min(max(int(num_bytes.sum()) // _PARTS, _MIN_GROUP_BYTES), _MAX_GROUP_BYTES)
    label = length_class[order] * 2**32 + bytes_before // group_bytes
    starts = (label.diff().nonzero().flatten() + 1).tolist()
    ordered = phase[order]
    return [ordered[start:end] for start, end in zip([0, *starts], [*starts, len(phase)], strict=True)]


def _ceil_log2(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.clamp_min(1).double().log2().ceil().long()


def _make_group(
    sequences: _Sequences,
    lens: tuple[int, int],
    num_tokens: int,
    block_size: int,
    sliding_window: Window | None,
    dtype: torch.dtype,
) -> SequenceGroup:
    num_queries, num_keys = lens
    index = torch.arange(max(lens), device=sequences.context_len.device)
    query, key = index[:num_queries], sequences.first_key + index[:num_keys]  # position in the chunk, in the sequence
    token = sequences.query_start + query
    own_key = torch.where(key < sequences.context_len, key, sequences.first_key)
    block = sequences.block_tables.gather(1, own_key // block_size)

    query_position = (sequences.context_len - sequences.query_len + query)[:, :, None]
    hidden = key[:, None, :] > query_position
    if sliding_window is not None:
        hidden |= key[:, None, :] < first_seen(query_position, sliding_window)
    lowest = torch.finfo(dtype).min  # finite, so that a query that sees nothing (padding) gives no NaN
    return SequenceGroup(
        query_index=token.clamp_max(num_tokens - 1).flatten(),
        output_index=torch.where(query < sequences.query_len, token, num_tokens).flatten(),
        key_slots=(block * block_size + own_key % block_size).flatten(),
        mask=hidden.to(dtype).mul_(lowest)[:, None],
        num_seqs=len(sequences),
        num_queries=num_queries,
        num_keys=num_keys,
    )
