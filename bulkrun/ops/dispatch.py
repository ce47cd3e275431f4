"""Chooses between an op's torch reference and its Triton twin, by where the tensors are. Knows no op.

Triton is imported when the first op meets a CUDA tensor, so importing ops needs no Triton and no device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether ops over this tensor go through Triton."""
    return tensor.is_cuda and _has_triton()


def by_device(reference: Callable[P, R]) -> Callable[P, R]:
    """The op whose reference is `bulkrun.ops.X.f` and whose kernel is `bulkrun.ops.triton.X.f`, of the same signature.

    The first positional argument is the tensor that decides.
    """
    module, name = triton_module(reference), reference.__name__

    @wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if not uses_triton(first):
            return reference(*args, **kwargs)
        kernel: Callable[P, R] = getattr(import_module(module), name)
        return kernel(*args, **kwargs)

    return op


def triton_module(reference: Callable[..., object]) -> str:
    """Where the twin of a reference lives."""
    return reference.__module__.replace("bulkrun.ops.", "bulkrun.ops.triton.")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
