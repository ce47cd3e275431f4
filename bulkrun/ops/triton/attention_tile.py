"""What the attention kernels share: one tile of keys folded into a running softmax, and who owns a tile of queries.

M query rows (tokens x query heads of one key head), N keys, D the values' dimensions padded to a power of two. Where
values are the last dimensions of their keys (latent attention), a tile of them is read once and multiplied twice, and R
are the rest of a key, the dimensions before: 64 + 512 as one tile would be padded to 1024. Scores are kept in base 2
and float32. Knows the paged cache's layout [N, B, K, D]; knows no grid and no output.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from bulkrun.ops.attention.metadata import TILE_ROWS

LOG2_E = tl.constexpr(1.4426950408889634)
_OWNERS_AT_ONCE = tl.constexpr(16)


@triton.jit
def attend_tile(
    q_MD,
    q_rest_MR,  # see `load_rest`
    acc_MD,
    max_M,
    sum_M,
    k_ptr,  # at the key head's first element, as v_ptr
    v_ptr,
    block_table_ptr,  # at the sequence's row
    tile_start,  # position of the tile's first key
    first_key,  # only keys at [first_key, end_key) are read: others may be anything, NaN included
    end_key,
    position_M,
    scale,
    SLOT_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    REST: tl.constexpr,  # dimensions of a key before those that are its value; 0: values are beside keys
    PADDED_REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # as of `first_seen`; 0: none
    SOFT_CAP: tl.constexpr,  # 0.0: none
    MASKED: tl.constexpr,  # False: every row sees every key of the tile
):
    """(acc_MD, max_M, sum_M) with the tile's keys added; rows that see none of them stay exactly as they are."""
    key_N = tile_start + tl.arange(0, BLOCK_N)
    in_range_N = (key_N >= first_key) & (key_N < end_key)
    if MASKED:
        block_N = tl.load(block_table_ptr + key_N // BLOCK_SIZE, mask=in_range_N, other=0)
    else:
        block_N = tl.load(block_table_ptr + key_N // BLOCK_SIZE)
    slot_N = block_N.to(tl.int64) * BLOCK_SIZE + key_N % BLOCK_SIZE
    if REST == 0:
        k_ND = _load_rows(k_ptr, slot_N, in_range_N, SLOT_STRIDE, VALUE_DIM, PADDED_DIM, MASKED)
    v_ND = _load_rows(v_ptr, slot_N, in_range_N, SLOT_STRIDE, VALUE_DIM, PADDED_DIM, MASKED)
    # fp8 is read but not multiplied as such: Hopper's fp8 products keep 14 bits of a sum. It becomes float16,
    # which holds every fp8 number and takes one instruction for two; bfloat16 takes four, two of them slow ones. (Tiles
    # of 256 dimensions have no registers left for queries of another dtype; of latents, where shared memory has one
    # tile for two, those of 512 for wide matrix instructions.)
    IS_FP8: tl.constexpr = v_ND.dtype.is_fp8()
    HAS_ROOM: tl.constexpr = PADDED_DIM <= 128 or (REST > 0 and (PADDED_DIM <= 256 or q_MD.shape[0] < 64))
    if IS_FP8 and q_MD.dtype.is_bf16() and HAS_ROOM:
        q_MD, q_rest_MR = q_MD.to(tl.float16), q_rest_MR.to(tl.float16)
    if REST == 0:
        k_ND = k_ND.to(q_MD.dtype)
    v_ND = v_ND.to(q_MD.dtype)
    if IS_FP8 and MASKED and q_MD.shape[0] < 64 and PADDED_DIM == 128:
        # Every tile begins before the end, but the compiler does not know, so it cannot move the change of layout for
        # the narrow matrix instructions ahead of the conversion, where it would take values byte by byte: a third fewer
        # instructions in the loop (other widths gain less and spill).
        v_ND = tl.where(tile_start < end_key, v_ND, 0.0)

    if REST == 0:
        product_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="tf32x3")
    else:
        k_rest_NR = _load_rows(k_ptr, slot_N, in_range_N, SLOT_STRIDE, REST, PADDED_REST, MASKED).to(q_MD.dtype)
        product_MN = tl.dot(q_MD, tl.trans(v_ND), input_precision="tf32x3")
        product_MN = tl.dot(q_rest_MR, tl.trans(k_rest_NR), product_MN, input_precision="tf32x3")
    score_MN = scaled(product_MN, scale, SOFT_CAP)
    if MASKED:
        score_MN = masked(score_MN, in_range_N, key_N, position_M, SLIDING_WINDOW)
    return fold(score_MN, v_ND, acc_MD, max_M, sum_M)


@triton.jit
def _load_rows(
    cache_ptr,
    slot_N,
    in_range_N,
    SLOT_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The first DIM dimensions of some slots, padded with zeros."""
    dim_D = tl.arange(0, PADDED_DIM)
    is_read_ND = (dim_D < DIM)[None, :]
    if MASKED:
        is_read_ND = is_read_ND & in_range_N[:, None]
    offset_ND = slot_N[:, None] * SLOT_STRIDE + dim_D[None, :]
    if MASKED or DIM != PADDED_DIM:
        rows_ND = tl.load(cache_ptr + offset_ND, mask=is_read_ND, other=0.0)
    else:
        rows_ND = tl.load(cache_ptr + offset_ND)
    return rows_ND


@triton.jit
def load_rest(q_ptr, row_M, q_MD, is_real_M, REST: tl.constexpr, PADDED_REST: tl.constexpr):
    """The dimensions of queries, which begin at `row_M`, that meet the rest of a key; anything where there is none."""
    if REST == 0:
        q_rest_MR = q_MD
    else:
        rest_R = tl.arange(0, PADDED_REST)
        is_real_MR = is_real_M[:, None] & (rest_R < REST)[None, :]
        q_rest_MR = tl.load(q_ptr + row_M[:, None] + rest_R[None, :], mask=is_real_MR, other=0.0)
    return q_rest_MR


@triton.jit
def scaled(score_MN, scale, SOFT_CAP: tl.constexpr):
    """Scores in base 2 of products of queries and keys."""
    if SOFT_CAP > 0.0:
        capped_MN = 2.0 * tl.sigmoid(score_MN * (2.0 * scale / SOFT_CAP)) - 1.0  # tanh, which Triton lacks
        return capped_MN * (SOFT_CAP * LOG2_E)
    return score_MN * (scale * LOG2_E)


@triton.jit
def masked(score_MN, in_range_N, key_N, position_M, SLIDING_WINDOW: tl.constexpr):
    """Scores, of -inf where a row does not see a key."""
    sees_MN = in_range_N[None, :] & (key_N[None, :] <= position_M[:, None])
    if SLIDING_WINDOW != 0:
        sees_MN = sees_MN & (key_N[None, :] >= first_seen(position_M, SLIDING_WINDOW)[:, None])
    return tl.where(sees_MN, score_MN, float("-inf"))


@triton.jit
def first_seen(position, SLIDING_WINDOW: tl.constexpr):
    """The first key that queries at these positions see, below 0: the first of all. SLIDING_WINDOW: of `kernel_window`,
    not 0."""
    if SLIDING_WINDOW < 0:
        return position - position % (-SLIDING_WINDOW)
    return position - SLIDING_WINDOW + 1


@triton.jit
def fold(score_MN, v_ND, acc_MD, max_M, sum_M):
    """(acc_MD, max_M, sum_M) with a tile's scores, of -inf where a row does not see a key, and its values added."""
    weight_MN, decay_M, max_M, sum_M = weigh(score_MN, max_M, sum_M)
    acc_MD = tl.dot(weight_MN.to(v_ND.dtype), v_ND, acc_MD * decay_M[:, None], input_precision="tf32x3")
    return acc_MD, max_M, sum_M


@triton.jit
def weigh(score_MN, max_M, sum_M):
    """The weights of a tile's values, by how much what was summed before decays, and (max_M, sum_M) with the tile."""
    new_max_M = tl.maximum(max_M, tl.max(score_MN, 1))
    base_M = tl.where(new_max_M == float("-inf"), 0.0, new_max_M)  # a row that has seen nothing: not inf - inf
    weight_MN = tl.exp2(score_MN - base_M[:, None])
    decay_M = tl.exp2(max_M - base_M)
    return weight_MN, decay_M, new_max_M, sum_M * decay_M + tl.sum(weight_MN, 1)


@triton.jit
def add_sink(sum_M, max_M, sinks_ptr, head_M, NUM_HEADS: tl.constexpr):
    """sum_M with each row's sink, a score without a value, after all keys. A row that saw none stays as it is."""
    sink_M = tl.load(sinks_ptr + head_M, mask=head_M < NUM_HEADS, other=0.0) * LOG2_E
    return tl.where(max_M == float("-inf"), sum_M, sum_M + tl.exp2(sink_M - max_M))


@triton.jit
def find_owner(tile, cu_lens_ptr, num_owners, TILE: tl.constexpr):
    """The owner of a tile of a ragged batch, and the owner's first tile.

    Owner o has the items cu_lens[o] to cu_lens[o + 1] and the tiles from (cu_lens[o] - cu_lens[0]) // TILE + o on:
    enough for its items, perhaps one too many. So the grid's size is known without the lengths: see `num_tiles`.

    The search looks at many owners at a time: each wait for memory is as long as some tiles of keys take. (Counting
    all of them in a vector would be one wait, but Triton 3.9 forgets then that rows of keys are aligned.)
    """
    first_item = tl.load(cu_lens_ptr)
    owner, end = 0, num_owners  # the owner is between them
    while end - owner > 1:
        step = (end - owner + _OWNERS_AT_ONCE - 1) // _OWNERS_AT_ONCE
        num_begun = 0
        for i in tl.static_range(1, _OWNERS_AT_ONCE):
            other = owner + i * step
            start = (tl.load(cu_lens_ptr + other, mask=other < end, other=0) - first_item) // TILE + other
            num_begun += ((other < end) & (start <= tile)).to(tl.int32)
        owner += num_begun * step
        end = tl.minimum(owner + step, end)
    return owner, (tl.load(cu_lens_ptr + owner) - first_item) // TILE + owner


def num_tiles(num_items: int, num_owners: int, tile: int) -> int:
    """Tiles that surely suffice for `num_items` ragged items of `num_owners` owners."""
    return num_items // tile + num_owners


def padded_dim(head_dim: int) -> int:
    """The head dim as a tile's side: a power of two, at least the 16 that a matrix product needs."""
    return max(triton.next_power_of_2(head_dim), 16)


def dims_of_tile(head_dim: int, value_dim: int) -> dict[str, int]:
    """What kernels are compiled for: a head's dimensions, its values', and the sides of tiles of values and of the rest
    of a key; fewer values' dimensions than a head's are within keys."""
    rest = head_dim - value_dim
    return {
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "PADDED_DIM": padded_dim(value_dim),
        "PADDED_REST": padded_dim(rest) if rest else 0,
    }


def tile_shape(head_dim: int, q_THD: torch.Tensor) -> tuple[int, int]:
    """Query rows and keys of a prefill tile: 128 x 64, or what shared memory and registers hold of wide heads."""
    if padded_dim(head_dim) * q_THD.element_size() <= 256:
        return TILE_ROWS, 64
    if padded_dim(head_dim) <= (128 if is_cramped(q_THD) else 256):
        return 64, 32
    return 64 if q_THD.element_size() <= 2 else 16, 16  # 512 dimensions: Gemma 4's layers of full attention


def paged_tile_shape(head_dim: int, value_dim: int, q_THD: torch.Tensor) -> tuple[int, int]:
    """As `tile_shape`, or of latents of 512 dimensions: large shared memory has one tile of them, of others two."""
    if value_dim == head_dim or padded_dim(value_dim) <= 256 or q_THD.element_size() > 2:
        return tile_shape(value_dim, q_THD)
    return (64, 32) if has_large_shared_memory(q_THD.device) else (32, 16)


def num_warps(rows: int, head_dim: int) -> int:
    """Warps of a prefill tile: so many that their registers hold the sums of its rows."""
    return 8 if rows == TILE_ROWS or rows * padded_dim(head_dim) > 2**14 else 4


def heads_of_program(group: int, value_dim: int, q_THD: torch.Tensor) -> int:
    """How many of a key head's query heads a program takes: all, or a divisor where their sums find no room."""
    has_room = q_THD.element_size() <= 2 and has_large_shared_memory(q_THD.device)
    most = 2 ** (15 if has_room else 13 if is_cramped(q_THD) else 14) // padded_dim(value_dim)
    return max(heads for heads in range(1, min(group, most) + 1) if group % heads == 0)


def packed_rows(rows: int, group: int) -> tuple[int, int]:
    """Rows of a tile of at least `rows`, a power of two, and how many tokens with all `group` heads they hold.

    Row r is of token r // group and head r % group: what is left over, less than a group, is at the tile's end. A group
    padded to a power of two would leave rows unused in every token: 3 of 8 where 5 query heads share a key head.
    """
    rows = max(rows, triton.next_power_of_2(group))
    return rows, rows // group


def num_stages(head_dim: int, q_THD: torch.Tensor) -> int:
    """Stages of the pipeline that loads keys and values, by shared memory (float32, for comparisons, is slow).

    Half of them are for the block ids, which the addresses of keys wait for. With fewer than five a loop waits for the
    tile that it has just asked for.
    """
    row_bytes = padded_dim(head_dim) * q_THD.element_size()
    if is_cramped(q_THD):
        return 1
    if q_THD.element_size() <= 2 and has_large_shared_memory(q_THD.device):
        return 5
    return 3 if row_bytes <= 256 else 2 if row_bytes <= 512 else 1


def is_cramped(q_THD: torch.Tensor) -> bool:
    """Whether float32 has to do with the 99 KB of a small GPU."""
    return q_THD.element_size() > 2 and not has_large_shared_memory(q_THD.device)


@cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may have the 132 KB that five stages take: on A100, H100, B200, but on no smaller GPU of their
    generations. Where nothing runs (interpreted, or compiled only) the answer is that of an H100."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))
