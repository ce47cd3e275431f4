"""Whose a tile of a ragged batch is, against a walk over all owners."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from bulkrun.ops.triton.attention_tile import find_owner, num_tiles

MOST_TILES = 24  # of a case: the interpreter takes its time for each


@triton.jit
def _find_kernel(tile_ptr, cu_lens_ptr, num_owners, found_ptr, TILE: tl.constexpr):
    tile = tl.load(tile_ptr + tl.program_id(0))
    owner, first_tile = find_owner(tile, cu_lens_ptr, num_owners, TILE)
    tl.store(found_ptr + 2 * tl.program_id(0), owner)
    tl.store(found_ptr + 2 * tl.program_id(0) + 1, first_tile)


@pytest.mark.parametrize("tile", [1, 25, 32])
@pytest.mark.parametrize("num_owners", [1, 2, 15, 16, 17, 31, 255, 256, 257, 900])
def test_a_tiles_owner_is_the_last_one_that_has_begun(num_owners: int, tile: int, device: str) -> None:
    """Owners without items too; lengths begin anywhere, as those of prompts behind sequences that decode."""
    generator = torch.Generator().manual_seed(num_owners)
    lens = torch.randint(0, 90, (num_owners,), generator=generator)
    cu_lens = torch.cat((torch.tensor([7]), 7 + lens.cumsum(0))).int()
    starts = [(int(before) - 7) // tile + owner for owner, before in enumerate(cu_lens[:-1])]
    tiles = torch.arange(num_tiles(int(lens.sum()), num_owners, tile))
    some = tiles[torch.randperm(len(tiles), generator=generator)[:MOST_TILES]].int()
    found = torch.full((len(some), 2), -1, dtype=torch.int32, device=device)
    _find_kernel[(len(some),)](some.to(device), cu_lens.to(device), num_owners, found, TILE=tile)
    owners = [max(owner for owner, start in enumerate(starts) if start <= one) for one in some.tolist()]
    assert found.tolist() == [[owner, starts[owner]] for owner in owners]
