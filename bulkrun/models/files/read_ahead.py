"""Tensors from files into memory as fast as the disk gives them: several readers, always some tensors ahead.

A mapped file is read by page faults, one after the other, by whoever copies the tensor: the disk waits for the copy and
the copy for the disk. Here readers fetch the next pieces while a tensor is used, straight into the place where it
belongs if that is memory of the host, else into a buffer for the one copy it still takes (pinned where that is to a
GPU). Knows files and memory; knows no model.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

import torch

from bulkrun.errors import ModelError
from bulkrun.models.files.checkpoint import StoredTensor

NUM_READERS = 8  # enough requests in flight for a fast disk; the page cache is copied by as many cores
PIECE_BYTES = 16 * 2**20
READ_AHEAD_BYTES = 256 * 2**20  # beyond the tensor in use


class _UnderWay(NamedTuple):
    stored: StoredTensor
    tensor: torch.Tensor
    pieces: list[Future[None]]


def read_tensors(
    stored: Sequence[StoredTensor], place: Callable[[StoredTensor], torch.Tensor | None], *, pinned: bool = False
) -> Iterator[tuple[StoredTensor, torch.Tensor]]:
    """Each tensor, read, in the order given. Raises ModelError where a file cannot be read to its end.

    `place` says where a tensor belongs: contiguous host memory of its dtype and size, or None for a new tensor, in
    page-locked memory if `pinned`.
    """
    with ExitStack() as stack:
        streams = {file: stack.enter_context(file.open("rb")) for file in {one.file for one in stored}}
        readers = stack.enter_context(ThreadPoolExecutor(NUM_READERS, thread_name_prefix="weights"))
        under_way: deque[_UnderWay] = deque()
        num_bytes = 0
        for one in stored:
            under_way.append(_start(readers, streams[one.file].fileno(), one, place(one), pinned))
            num_bytes += one.num_bytes
            while num_bytes > READ_AHEAD_BYTES:
                num_bytes -= under_way[0].stored.num_bytes
                yield _finish(under_way.popleft())
        while under_way:
            yield _finish(under_way.popleft())


def release_pinned(device: torch.device) -> None:
    """Give back the page-locked memory that was read into: torch keeps it for its next user, and there is none.

    Up to twice the largest tensor, for sizes are rounded up to powers of two.
    """
    if hasattr(torch._C, "_host_emptyCache"):
        torch.cuda.synchronize(device)  # the last copies
        torch._C._host_emptyCache()


def _start(
    readers: ThreadPoolExecutor, fd: int, stored: StoredTensor, place: torch.Tensor | None, pinned: bool
) -> _UnderWay:
    tensor = torch.empty(stored.shape, dtype=stored.dtype, pin_memory=pinned) if place is None else place
    assert tensor.is_contiguous() and tensor.nbytes == stored.num_bytes, "a tensor is read as it lies in the file"
    cuts = range(0, stored.num_bytes, PIECE_BYTES)
    pieces = [readers.submit(_read_piece, fd, stored, tensor, cut) for cut in cuts]
    return _UnderWay(stored, tensor, pieces)


def _finish(read: _UnderWay) -> tuple[StoredTensor, torch.Tensor]:
    for piece in read.pieces:
        piece.result()
    return read.stored, read.tensor


def _read_piece(fd: int, stored: StoredTensor, tensor: torch.Tensor, cut: int) -> None:
    size = min(PIECE_BYTES, stored.num_bytes - cut)
    rest = memoryview((ctypes.c_char * size).from_address(tensor.data_ptr() + cut)).cast("B")
    offset = stored.offset + cut
    while rest:
        try:
            got = os.preadv(fd, [rest], offset)
        except OSError as error:
            raise ModelError(f"{stored.file}: cannot be read ({error}); try again, or download it again") from None
        if got == 0:
            raise ModelError(f"{stored.file}: torn: it ends within {stored.name}; download it again")
        rest, offset = rest[got:], offset + got
