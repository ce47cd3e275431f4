"""Memory for pages that nobody has written yet, found by all threads at once before a step writes there.

The kernel clears a page when it is first written, and a virtual machine's host may have to find it first: 0.4 GB/s by
one thread were seen (tests/benchmarks/LOG.md). A step that writes the keys of one layer stays within one or two huge
pages, so that its threads would wait for each other; here each one has tensors of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p

import torch

from bulkrun.ops.cpu.library import c_function


def touch_pages(tensors: Sequence[torch.Tensor], first: int, end: int) -> None:
    """Touch rows `first` to `end` of contiguous CPU tensors of one size; what they hold stays."""
    row_bytes = tensors[0].stride(0) * tensors[0].element_size()
    addresses = (c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
    touch = c_function("touch_pages", ctypes.POINTER(c_void_p), *[c_int64] * 3, c_int32)
    touch(addresses, len(tensors), first * row_bytes, end * row_bytes, torch.get_num_threads())
