"""Which tile of a product a program takes: a few tiles of rows go through the same outputs one after another, while the
weight is in the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

_GROUP = tl.constexpr(8)  # tiles of rows


@triton.jit
def place_of_program(program, num_row_tiles, NUM_COLUMN_TILES: tl.constexpr):
    """(tile of rows, tile of outputs), each pair for one of `num_row_tiles` * `NUM_COLUMN_TILES` programs."""
    first_row_tile = program // (_GROUP * NUM_COLUMN_TILES) * _GROUP
    group = tl.minimum(num_row_tiles - first_row_tile, _GROUP)
    in_group = program % (_GROUP * NUM_COLUMN_TILES)
    return first_row_tile + in_group % group, in_group // group
