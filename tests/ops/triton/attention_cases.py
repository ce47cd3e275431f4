"""Steps over a poisoned paged cache, and their exact attention: dense, one sequence at a time, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from bulkrun.ops import AttentionMetadata
from bulkrun.windows import Chunks, Window


@dataclass(frozen=True, slots=True)
class Case:
    """A step with everything `paged_attention` takes; slots that no query may read hold NaN."""

    q_THD: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    meta: AttentionMetadata
    slots: list[torch.Tensor]  # per sequence: the slot of every position
    query_lens: list[int]


def make_case(
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int, int],
    *,
    value_dim: int | None = None,
    device: str,
    num_decode_seqs: int | None = None,
    block_size: int = 4,
    window: Window | None = None,
    dtype: torch.dtype = torch.float32,
    shared_blocks: int = 0,
    seed: int = 0,
) -> Case:
    """heads: (H, K, D). value_dim: values are so many of the last dimensions of their keys, in place. The first
    `shared_blocks` blocks are the same for all sequences; blocks are in random order."""
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(seed)
    own_blocks = [max(-(-length // block_size) - shared_blocks, 0) for length in context_lens]
    pool = (torch.randperm(sum(own_blocks) + shared_blocks, generator=generator) + 1).tolist()
    shared = [pool.pop() for _ in range(shared_blocks)]
    tables = [
        shared[: -(-n // block_size)] + [pool.pop() for _ in range(k)]
        for n, k in zip(context_lens, own_blocks, strict=True)
    ]
    slots = [
        torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(n)], dtype=torch.int64)
        for table, n in zip(tables, context_lens, strict=True)
    ]
    k_cache, v_cache = torch.full(
        (2, sum(own_blocks) + shared_blocks + 1, block_size, num_kv_heads, head_dim), math.nan
    )
    for own, query_len in zip(slots, query_lens, strict=True):
        seen = own if window is None else own[_first_seen(len(own) - query_len, window) :]
        for cache in (k_cache, v_cache):
            cache.flatten(0, 1)[seen] = torch.randn(len(seen), num_kv_heads, head_dim, generator=generator)
    q_THD = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    width = max((len(table) for table in tables), default=0) + 2
    meta = AttentionMetadata(
        slot_mapping_T=torch.cat([own[len(own) - q :] for own, q in zip(slots, query_lens, strict=True)]).to(device),
        block_tables_SM=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32, device=device),
        context_lens_S=torch.tensor(context_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int().to(device),
        num_decode_seqs=_leading_ones(query_lens) if num_decode_seqs is None else num_decode_seqs,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    q_THD, k_cache, v_cache = (tensor.to(device, dtype) for tensor in (q_THD, k_cache, v_cache))
    if value_dim is not None:
        v_cache = k_cache[..., -value_dim:]
    return Case(q_THD, k_cache, v_cache, meta, slots, query_lens)


def _first_seen(position: int, window: Window) -> int:
    return position // window.size * window.size if isinstance(window, Chunks) else max(position - window + 1, 0)


def _are_seen(key: torch.Tensor, position: torch.Tensor, window: Window) -> torch.Tensor:
    if isinstance(window, Chunks):
        return key // window.size == position // window.size
    return key > position - window


def sinks_of(case: Case) -> torch.Tensor:
    """Another one for each head, [H]: below all scores to above them."""
    return torch.linspace(-3, 6, case.q_THD.shape[1], device=case.q_THD.device)


def exact_attention(
    case: Case, scale: float, window: Window | None, soft_cap: float | None, sinks_H: torch.Tensor | None = None
) -> torch.Tensor:
    """[T, H, V] float64 on the CPU; torch's own attention where it can (it knows no soft-cap and no sinks)."""
    group = case.q_THD.shape[1] // case.k_cache.shape[2]
    out = []
    for q_QHD, slots in zip(case.q_THD.double().cpu().split(case.query_lens), case.slots, strict=True):
        k_HLD, v_HLD = (
            cache.cpu().flatten(0, 1)[slots].double().transpose(0, 1).repeat_interleave(group, 0)
            for cache in (case.k_cache, case.v_cache)
        )
        position = torch.arange(len(slots) - len(q_QHD), len(slots))[:, None]
        key = torch.arange(len(slots))
        sees = (key <= position) & (torch.tensor(True) if window is None else _are_seen(key, position, window))
        k_HLD, v_HLD = (x.masked_fill(~sees.any(0)[:, None], 0.0) for x in (k_HLD, v_HLD))
        q_HQD = q_QHD.transpose(0, 1)
        if soft_cap is None and sinks_H is None:
            attended = F.scaled_dot_product_attention(q_HQD, k_HLD, v_HLD, attn_mask=sees, scale=scale)
        else:
            scores = q_HQD @ k_HLD.mT * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            scores = scores.masked_fill(~sees, -math.inf)
            if sinks_H is not None:
                scores = torch.cat((scores, sinks_H.cpu().double()[:, None, None].expand(*scores.shape[:2], 1)), -1)
            attended = scores.softmax(-1)[..., : len(slots)] @ v_HLD
        out.append(attended.transpose(0, 1))
    return torch.cat(out)


def _leading_ones(query_lens: list[int]) -> int:
    return next((i for i, q in enumerate(query_lens) if q != 1), len(query_lens))
