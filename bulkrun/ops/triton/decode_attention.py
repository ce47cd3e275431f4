"""Attention of one query token per sequence over a paged cache: long contexts are cut into chunks of a fixed size.

One program takes all query heads of one key head over one chunk, so keys and values are read once; `partial_results`
says where chunks begin and merges them. How many programs there are depends on bounds that the host knows, what they do
on lengths that the device knows, so that a CUDA graph can hold them. Knows no prefill; a shared prefix's partial
results may be there already.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.triton import partial_results
from bulkrun.ops.triton.attention_pairs import attend_pairs
from bulkrun.ops.triton.attention_tile import (
    add_sink,
    attend_tile,
    dims_of_tile,
    heads_of_program,
    is_cramped,
    load_rest,
    padded_dim,
    paged_tile_shape,
)
from bulkrun.ops.triton.partial_results import PartialResults, merge_parts, parts_of
from bulkrun.windows import Window, kernel_window

_ENOUGH_PROGRAMS = 2048  # a few for each place on a large GPU: more only have to be started


def decode_attention(
    q_THD: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables_SM: torch.Tensor,
    context_lens_S: torch.Tensor,
    out_THV: torch.Tensor,
    *,
    scale: float,
    sliding_window: Window | None,
    soft_cap: float | None,
    sinks_H: torch.Tensor | None = None,
    partial: PartialResults,
    prefix_lens_S: torch.Tensor | None = None,
) -> None:
    """Write the rows of decode sequences [S], the first of `out_THV`; sequences without context get zeros.

    prefix_lens_S: int32; the parts of a sequence's shared prefix are in `partial` already.
    """
    num_heads, head_dim = q_THD.shape[1:]
    num_kv_heads, block_size = k_cache.shape[2], k_cache.shape[1]
    num_seqs = context_lens_S.numel()
    value_dim = v_cache.shape[3]
    group, dim = num_heads // num_kv_heads, padded_dim(value_dim)
    heads = heads_of_program(group, value_dim, q_THD)
    head_blocks = group // heads
    padded_group = max(triton.next_power_of_2(heads), 16)
    is_latent = value_dim < head_dim
    can_pair = 32 <= dim <= 128 and head_dim % 2 == 0 and not is_latent  # half of a head is a side of a product
    in_pairs = k_cache.dtype == FP8 and q_THD.element_size() == 2 and can_pair
    if in_pairs:
        k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
    workers = programs_per_sequence(partial.max_parts, num_seqs * head_blocks * num_kv_heads)
    _decode_kernel[(num_seqs * head_blocks, num_kv_heads, workers)](
        q_THD,
        k_cache,
        v_cache,
        block_tables_SM,
        context_lens_S,
        prefix_lens_S,
        sinks_H,
        out_THV,
        partial.out,
        partial.lse,
        partial.starts_S,
        scale,
        q_THD.stride(0),
        block_tables_SM.stride(0),
        NUM_HEADS=num_heads,
        GROUP=heads,
        PADDED_GROUP=padded_group,
        HEAD_BLOCKS=head_blocks,
        SLOT_STRIDE=num_kv_heads * head_dim,
        BLOCK_SIZE=block_size,
        **dims_of_tile(head_dim, value_dim),
        BLOCK_N=paged_tile_shape(head_dim, value_dim, q_THD)[1],
        CHUNK=partial_results.CHUNK,
        SLIDING_WINDOW=kernel_window(sliding_window),
        SOFT_CAP=soft_cap or 0.0,
        HAS_PREFIX=prefix_lens_S is not None,
        HAS_SINKS=sinks_H is not None,
        IN_PAIRS=in_pairs,
        num_warps=_num_warps(padded_group, dim, k_cache.dtype, is_latent=is_latent),
        # half of them for the block ids, which keys wait for: keys and values are two tiles deep
        num_stages=_num_stages(dim, q_THD, is_latent=is_latent),
    )
    if partial.max_parts > 1:
        merge_parts(partial, context_lens_S, prefix_lens_S, out_THV, sliding_window=sliding_window, sinks_H=sinks_H)


def _num_warps(rows: int, dim: int, kv_dtype: torch.dtype, *, is_latent: bool) -> int:
    """Two read twice as wide as four and exchange less: 3% faster between products that slow an H200's clock. Latents
    have as many as hold the sums of a program's query heads, beside converted keys where they are of fp8."""
    if is_latent:
        return 8 if rows * dim > (2**13 if kv_dtype == FP8 else 2**14) else 4
    return 2 if rows == 16 and dim <= 128 and kv_dtype.itemsize == 2 else 4


def _num_stages(dim: int, q_THD: torch.Tensor, *, is_latent: bool) -> int:
    """Of latents in float32 the rest of a key would find no room beside five."""
    has_room = not (is_latent and q_THD.element_size() > 2) and not is_cramped(q_THD)
    return 5 if dim * q_THD.element_size() <= 1024 and has_room else 1


def programs_per_sequence(num_parts: int, num_rows: int) -> int:
    """Among how many programs the parts of a sequence (or group) are dealt out, `num_rows` of such being there.

    At least two, so that one long context among short ones is not alone at the end.
    """
    return min(num_parts, max(2, triton.next_power_of_2(triton.cdiv(_ENOUGH_PROGRAMS, num_rows))))


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    block_tables_ptr,
    context_lens_ptr,
    prefix_lens_ptr,
    sinks_ptr,
    out_ptr,
    partial_ptr,
    lse_ptr,
    starts_ptr,
    scale,
    q_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a program
    PADDED_GROUP: tl.constexpr,
    HEAD_BLOCKS: tl.constexpr,  # programs that share a key head's query heads
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PADDED_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IN_PAIRS: tl.constexpr,  # the cache is one of fp8, read as int16
):
    REST: tl.constexpr = HEAD_DIM - VALUE_DIM
    seq = (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)  # programs that read the same keys are side by side
    kv_head = tl.program_id(1)
    first_head = (kv_head * HEAD_BLOCKS + tl.program_id(0) % HEAD_BLOCKS) * GROUP
    context_len = tl.load(context_lens_ptr + seq)
    first_key, num_shared, num_own = parts_of(context_len, prefix_lens_ptr, seq, CHUNK, SLIDING_WINDOW, HAS_PREFIX)
    if tl.program_id(2) >= tl.maximum(num_own, 1):  # the first one writes the zeros of sequences without context
        return

    head_M = tl.arange(0, PADDED_GROUP)
    dim_D = tl.arange(0, PADDED_DIM)
    is_real_MD = (head_M < GROUP)[:, None] & (dim_D < VALUE_DIM)[None, :]
    offset_MD = (first_head + head_M)[:, None] * VALUE_DIM + dim_D[None, :]
    q_ptr += seq * q_stride
    if not IN_PAIRS:
        q_offset_MD = (first_head + head_M)[:, None] * HEAD_DIM + dim_D[None, :]
        q_MD = tl.load(q_ptr + REST + q_offset_MD, mask=is_real_MD, other=0.0)
        q_rest_MR = load_rest(q_ptr, (first_head + head_M) * HEAD_DIM, q_MD, head_M < GROUP, REST, PADDED_REST)
    position_M = tl.zeros([PADDED_GROUP], tl.int32) + (context_len - 1)
    head_start = kv_head * (HEAD_DIM // 2 if IN_PAIRS else HEAD_DIM)
    for index in range(tl.program_id(2), tl.maximum(num_own, 1), tl.num_programs(2)):
        chunk = first_key // CHUNK + index
        begin = tl.maximum(chunk * CHUNK, first_key)
        end = tl.minimum(chunk * CHUNK + CHUNK, context_len)
        if IN_PAIRS:
            acc_MD, max_M, sum_M = attend_pairs(
                q_ptr,
                k_ptr + head_start,
                v_ptr + head_start,
                block_tables_ptr + seq * table_stride,
                begin,
                end,
                position_M,
                first_head,
                scale,
                GROUP,
                PADDED_GROUP,
                SLOT_STRIDE,
                BLOCK_SIZE,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_N,
                SLIDING_WINDOW,
                SOFT_CAP,
            )
        else:
            acc_MD = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
            max_M = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
            sum_M = tl.zeros([PADDED_GROUP], tl.float32)
            for tile_start in range(begin // BLOCK_N * BLOCK_N, end, BLOCK_N):
                acc_MD, max_M, sum_M = attend_tile(
                    q_MD,
                    q_rest_MR,
                    acc_MD,
                    max_M,
                    sum_M,
                    k_ptr + head_start,
                    v_ptr + head_start,
                    block_tables_ptr + seq * table_stride,
                    tile_start,
                    begin,
                    end,
                    position_M,
                    scale,
                    SLOT_STRIDE,
                    BLOCK_SIZE,
                    VALUE_DIM,
                    PADDED_DIM,
                    REST,
                    PADDED_REST,
                    BLOCK_N,
                    SLIDING_WINDOW,
                    SOFT_CAP,
                    True,
                )
        if REST > 0:  # counted again, as registers are scarce before: the compiler does not know that this adds 0
            head_M = tl.arange(0, PADDED_GROUP) + tl.minimum(end - begin, 0)
            is_real_MD = (head_M < GROUP)[:, None] & (dim_D < VALUE_DIM)[None, :]
            offset_MD = (first_head + head_M)[:, None] * VALUE_DIM + dim_D[None, :]
        is_whole = (num_shared == 0) & (num_own <= 1)
        if HAS_SINKS:  # parts get none: the merge adds it
            with_sink_M = add_sink(sum_M, max_M, sinks_ptr, first_head + head_M, NUM_HEADS)
            sum_M = tl.where(is_whole, with_sink_M, sum_M)
        out_MD = acc_MD / tl.where(sum_M == 0.0, 1.0, sum_M)[:, None]
        if is_whole:
            tl.store(out_ptr + seq * NUM_HEADS * VALUE_DIM + offset_MD, out_MD, mask=is_real_MD)
        else:
            row = tl.load(starts_ptr + seq).to(tl.int64) + num_shared + index
            tl.store(partial_ptr + row * NUM_HEADS * VALUE_DIM + offset_MD, out_MD, mask=is_real_MD)
            lse_M = max_M + tl.log2(sum_M)
            tl.store(lse_ptr + row * NUM_HEADS + first_head + head_M, lse_M, mask=head_M < GROUP)
