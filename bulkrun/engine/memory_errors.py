"""How to recognize that memory ran out, whichever library reports it."""

from __future__ import annotations

import errno

import torch

MEMORY_ERRORS = (MemoryError, OSError, RuntimeError)  # torch.OutOfMemoryError is a RuntimeError
# how allocators that are not torch's own say it: its CPU one, cuBLAS, the CUDA runtime, Triton's launcher
_SIGNS = (
    "can't allocate memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUDA driver error: out of memory",
)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the error says that host or device has no memory left for what was asked."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return any(sign in str(error) for sign in _SIGNS)
