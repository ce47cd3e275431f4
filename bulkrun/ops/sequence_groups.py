"""Which sequences of a step the reference attention pads together, and where their keys lie.

A group is a rectangle: s sequences x Q queries x L keys. On a CPU groups are cut so that padding is little and the
gathered keys and values of one group stay in the processor's cache (one big rectangle is 5 to 10 times slower:
padding, and fresh pages for every gather). Elsewhere lengths are not known to the host, so there is one group for
decode and one for prefill chunks. Knows lengths and slots; knows no queries, keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.ops.attention_metadata import AttentionMetadata

_MAX_GROUP_BYTES = 6 * 2**20  # gathered K and V of one group: about what the caches hold
_MIN_GROUP_BYTES = 2**19  # below this, launching one more group costs more than the padding it saves
_PARTS = 8  # a step smaller than the cache is still cut in so many parts, against padding


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """s sequences padded to Q queries and L keys each."""

    query_index: torch.Tensor  # int64 [s * Q]: rows of q to read; padding repeats a valid row
    output_index: torch.Tensor  # int64 [s * Q]: rows of the output to write; padding goes to row T, past the end
    key_slots: torch.Tensor  # int64 [s * L]: cache slots to read; padding repeats the sequence's own first key
    mask: torch.Tensor  # float [s, 1, Q, L]: 0 where a query sees a key, the dtype's lowest number elsewhere
    num_seqs: int
    num_queries: int
    num_keys: int


def group_sequences(
    meta: AttentionMetadata, *, block_size: int, kv_bytes: int, sliding_window: int | None, dtype: torch.dtype
) -> list[SequenceGroup]:
    """Partition a step's sequences into groups, decode and prefill apart; `kv_bytes` is one token's K and V.

    A query at position p sees the keys at positions (p - sliding_window, p], or [0, p] without a window.
    """
    query_lens_S = meta.cu_seqlens_q.diff().long()
    contexts_S = meta.context_lens_S.long()
    first_key_S = torch.zeros_like(contexts_S)
    if sliding_window is not None:
        first_key_S = (contexts_S - query_lens_S - sliding_window + 1).clamp_min(0)
    num_keys_S = (contexts_S - first_key_S).clamp_min(1)

    groups = []
    all_rows = torch.arange(contexts_S.numel(), device=contexts_S.device)
    decode, chunks = all_rows[: meta.num_decode_seqs], all_rows[meta.num_decode_seqs :]
    for phase, max_query_len in ((decode, 1), (chunks, meta.max_query_len)):
        for rows in _split_by_length(phase, query_lens_S, num_keys_S, kv_bytes):
            lens = max_query_len, max(meta.max_context_len, 1)  # bounds, where asking the device would stall
            if rows.device.type == "cpu":
                lens = max(int(query_lens_S[rows].max()), 1), int(num_keys_S[rows].max())
            groups.append(_make_group(rows, lens, meta, first_key_S, block_size, sliding_window, dtype))
    return groups


def _split_by_length(
    rows: torch.Tensor, query_lens_S: torch.Tensor, num_keys_S: torch.Tensor, kv_bytes: int
) -> list[torch.Tensor]:
    """Rows cut into groups of similar length and cache-sized volume; one group where the host knows no lengths."""
    if rows.device.type != "cpu" or rows.numel() <= 1:
        return [rows] if rows.numel() else []
    queries, keys = query_lens_S[rows], num_keys_S[rows]
    length_class = torch.zeros_like(keys)
    if int(queries.max()) > 1:  # two lengths to pad: only sequences alike in both, to a factor of two, share a group
        length_class = 64 * _ceil_log2(queries) + _ceil_log2(keys)
    order = torch.argsort(length_class * 2**32 + keys)
    bytes_before = keys[order].cumsum(0) * kv_bytes
    group_bytes = min(max(int(bytes_before[-1]) // _PARTS, _MIN_GROUP_BYTES), _MAX_GROUP_BYTES)
    volume = (bytes_before - keys[order] * kv_bytes) // group_bytes
    label = length_class[order] * 2**32 + volume
    starts = label.diff().nonzero().flatten() + 1
    return list(torch.tensor_split(rows[order], starts.tolist()))


def _ceil_log2(lengths: torch.Tensor) -> torch.Tensor:
    return lengths.clamp_min(1).double().log2().ceil().long()


def _make_group(
    rows: torch.Tensor,
    lens: tuple[int, int],
    meta: AttentionMetadata,
    first_key_S: torch.Tensor,
    block_size: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> SequenceGroup:
    num_queries, num_keys = lens
    num_tokens = meta.slot_mapping_T.numel()
    context = meta.context_lens_S[rows].long()[:, None]
    query_start, query_end = meta.cu_seqlens_q[rows].long()[:, None], meta.cu_seqlens_q[rows + 1].long()[:, None]

    token = query_start + torch.arange(num_queries, device=rows.device)
    query_position = context - (query_end - token)
    key_position = first_key_S[rows][:, None] + torch.arange(num_keys, device=rows.device)
    key_position = torch.where(key_position < context, key_position, first_key_S[rows][:, None])
    block = meta.block_tables_SM[rows].long().gather(1, key_position // block_size)

    offset = torch.arange(num_keys, device=rows.device) + first_key_S[rows][:, None]  # where padding stays padding
    visible = offset[:, None, :] <= query_position[:, :, None]
    if sliding_window is not None:
        visible &= offset[:, None, :] > query_position[:, :, None] - sliding_window
    lowest = torch.finfo(dtype).min  # finite, so that a query that sees nothing (padding) gives no NaN
    return SequenceGroup(
        query_index=token.clamp_max(num_tokens - 1).flatten(),
        output_index=torch.where(token < query_end, token, num_tokens).flatten(),
        key_slots=(block * block_size + key_position % block_size).flatten(),
        mask=torch.zeros(visible.shape, dtype=dtype, device=rows.device).masked_fill_(~visible, lowest)[:, None],
        num_seqs=rows.numel(),
        num_queries=num_queries,
        num_keys=num_keys,
    )
