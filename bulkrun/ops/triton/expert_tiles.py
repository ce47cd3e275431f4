"""How products over experts share out their rows: a program takes some rows of one expert.

How many rows each expert got the device alone knows, so there are as many programs as the worst case needs, each finds
its expert, and those left over end at once: the host waits for nothing, and a step with such products can be captured.
"""

from __future__ import annotations

import triton
import triton.language as tl


def most_row_tiles(num_pairs: int, num_experts: int, tile_rows: int) -> int:
    """How many tiles so many pairs can need: every expert that has pairs may leave its last one nearly empty."""
    return (num_pairs + min(num_pairs, num_experts) * (tile_rows - 1)) // tile_rows


@triton.jit
def rows_of_tile(ends_ptr, tile, NUM_EXPERTS: tl.constexpr, BLOCK_X: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's expert, its first pair, and where its expert's pairs end; a tile too many: 0, 0, 0."""
    index_X = tl.arange(0, BLOCK_X)
    is_real_X = index_X < NUM_EXPERTS
    end_X = tl.load(ends_ptr + index_X, mask=is_real_X, other=0)
    start_X = tl.load(ends_ptr + index_X - 1, mask=is_real_X & (index_X > 0), other=0)
    num_tiles_X = (end_X - start_X + BLOCK_M - 1) // BLOCK_M
    first_tile_X = tl.cumsum(num_tiles_X, 0) - num_tiles_X
    is_its_X = (first_tile_X <= tile) & (tile < first_tile_X + num_tiles_X)
    expert = tl.sum(tl.where(is_its_X, index_X, 0), 0)
    first = tl.sum(tl.where(is_its_X, start_X + (tile - first_tile_X) * BLOCK_M, 0), 0)
    end = tl.sum(tl.where(is_its_X, end_X, 0), 0)
    return expert, first, end
