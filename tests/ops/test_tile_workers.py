"""Pieces shared among threads: each once, alone on its thread, and errors come back."""

from __future__ import annotations

import pytest
import torch

from bulkrun.ops.tile_workers import TileWorkers


@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("num_pieces", [0, 1, 4, 11])
def test_every_piece_is_computed_once_by_one_thread_alone(num_threads: int, num_pieces: int) -> None:
    workers, seen = TileWorkers(num_threads), []
    before = torch.get_num_threads()
    with workers.one_thread_each():
        workers.run(lambda piece: seen.append((piece, torch.get_num_threads())), range(num_pieces))
        with workers.all_together():
            assert torch.get_num_threads() == num_threads
    assert sorted(seen) == [(piece, 1) for piece in range(num_pieces)]
    assert torch.get_num_threads() == before


def test_what_a_piece_raises_comes_back() -> None:
    def fail(piece: int) -> None:
        if piece == 3:
            raise ValueError("piece 3")

    workers = TileWorkers(2)
    with workers.one_thread_each(), pytest.raises(ValueError, match="piece 3"):
        workers.run(fail, range(4))
