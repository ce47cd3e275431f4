"""Threads that share out independent pieces of a step's arithmetic, each piece computed by one thread alone.

torch's own threads may cut one sum in parts, and how many parts depends on how many threads there are. Pieces of a
fixed size that one thread computes give the same bits on any number of threads. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class TileWorkers:
    """As many threads as torch has when this is made; the calling thread is one of them."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or torch.get_num_threads()
        self._pool = None
        if self.num_threads > 1:
            self._pool = ThreadPoolExecutor(
                self.num_threads - 1, "tiles", initializer=torch.set_num_threads, initargs=(1,)
            )

    @contextmanager
    def one_thread_each(self) -> Iterator[None]:
        """Within, every torch op of the calling thread runs on that thread alone."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    @contextmanager
    def all_together(self) -> Iterator[None]:
        """Within: the calling thread has all threads, for an op whose sums do not depend on how many there are."""
        before = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def run(self, compute: Callable[[T], None], pieces: Sequence[T]) -> None:
        """`compute` every piece, in any order and in `torch.inference_mode()`; raises what a piece raises.

        The caller is within `one_thread_each`.
        """
        assert torch.get_num_threads() == 1, "sums would be cut by the number of threads"
        share = -(-len(pieces) // self.num_threads)
        rest = [pieces[start : start + share] for start in range(share, len(pieces), share)] if share else []
        assert self._pool is not None or not rest, "one thread has one share"
        futures = [self._pool.submit(_compute_all, compute, own) for own in rest] if self._pool else []
        _compute_all(compute, pieces[:share])
        for future in futures:
            future.result()


@torch.inference_mode()
def _compute_all(compute: Callable[[T], None], pieces: Sequence[T]) -> None:
    for piece in pieces:
        compute(piece)
