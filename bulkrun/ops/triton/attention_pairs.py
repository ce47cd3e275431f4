"""Decode attention over a cache of fp8, whose numbers are read and turned by twos: an even dimension and the odd one.

Matrix units take values key by key, the cache has them dimension by dimension, and what turns a tile on its way out of
shared memory moves 16 bits at a time. One byte at a time a tile has to be written back first, as numbers of 16 bits: an
H200 attended no faster over fp8 than over bfloat16 that way. So two dimensions stay one number of 16 bits until they
are in registers, and even and odd dimensions are multiplied apart. C are the pairs of a head, half its dimensions.

fp8 becomes float16, which holds each of its numbers. Otherwise as `attention_tile`. Knows no grid and no output.
"""

from __future__ import annotations

import triton
import triton.language as tl

from bulkrun.ops.triton.attention_tile import masked, scaled, weigh
from bulkrun.ops.triton.interpreted import IS_INTERPRETED


@triton.jit
def attend_pairs(
    q_ptr,  # at the sequence's row, of 16 bits, as heads are read from it
    k_ptr,  # int16, at the key head's first pair, as v_ptr
    v_ptr,
    block_table_ptr,  # at the sequence's row
    first_key,  # only keys at [first_key, end_key) are read: others may be anything, NaN included
    end_key,
    position_M,
    first_head,
    scale,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,  # in bytes
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """(acc_MD, max_M, sum_M) of the query heads of one key head over these keys."""
    pair_C = tl.arange(0, PADDED_DIM // 2)
    head_M = tl.arange(0, PADDED_GROUP)
    is_pair_C = pair_C < HEAD_DIM // 2
    is_real_MC = (head_M < GROUP)[:, None] & is_pair_C[None, :]
    offset_MC = (first_head + head_M)[:, None] * HEAD_DIM + 2 * pair_C[None, :]
    even_q_MC = tl.load(q_ptr + offset_MC, mask=is_real_MC, other=0.0).to(tl.float16)
    odd_q_MC = tl.load(q_ptr + offset_MC + 1, mask=is_real_MC, other=0.0).to(tl.float16)
    even_MC = tl.zeros([PADDED_GROUP, PADDED_DIM // 2], tl.float32)
    odd_MC = tl.zeros([PADDED_GROUP, PADDED_DIM // 2], tl.float32)
    max_M = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    sum_M = tl.zeros([PADDED_GROUP], tl.float32)
    for tile_start in range(first_key // BLOCK_N * BLOCK_N, end_key, BLOCK_N):
        key_N = tile_start + tl.arange(0, BLOCK_N)
        in_range_N = (key_N >= first_key) & (key_N < end_key)
        block_N = tl.load(block_table_ptr + key_N // BLOCK_SIZE, mask=in_range_N, other=0)
        slot_N = block_N.to(tl.int64) * BLOCK_SIZE + key_N % BLOCK_SIZE
        offset_NC = slot_N[:, None] * (SLOT_STRIDE // 2) + pair_C[None, :]
        is_read_NC = in_range_N[:, None] & is_pair_C[None, :]
        even_k_NC, odd_k_NC = both(tl.load(k_ptr + offset_NC, mask=is_read_NC, other=0))
        even_v_NC, odd_v_NC = both(tl.load(v_ptr + offset_NC, mask=is_read_NC, other=0))
        score_MN = tl.dot(odd_q_MC, tl.trans(odd_k_NC), tl.dot(even_q_MC, tl.trans(even_k_NC)))
        score_MN = masked(scaled(score_MN, scale, SOFT_CAP), in_range_N, key_N, position_M, SLIDING_WINDOW)
        weight_MN, decay_M, max_M, sum_M = weigh(score_MN, max_M, sum_M)
        even_MC = tl.dot(weight_MN.to(tl.float16), even_v_NC, even_MC * decay_M[:, None])
        odd_MC = tl.dot(weight_MN.to(tl.float16), odd_v_NC, odd_MC * decay_M[:, None])
    return tl.reshape(tl.join(even_MC, odd_MC), [PADDED_GROUP, PADDED_DIM]), max_M, sum_M


@triton.jit
def both(pair):
    """The two numbers of fp8 in each int16, the first one in its low bits, as float16."""
    if IS_INTERPRETED:
        even = (pair & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        return even, ((pair >> 8) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return tl.inline_asm_elementwise(  # of two pairs at a time: the even ones side by side, then the odd ones
        """
        {
            .reg .b32 bytes;
            .reg .b16 evens, odds;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {evens, odds}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, evens;
            cvt.rn.f16x2.e4m3x2 $1, odds;
        }
        """,
        "=r,=r,r",
        [pair],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )
