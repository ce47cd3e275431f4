"""Chooses between an op's torch reference and its twins, Triton or compiled C++, by where tensors are. Knows no op.

Triton is imported when the first op meets a CUDA tensor, and C++ is compiled when the first one meets a tensor on a
CPU, so importing ops needs no Triton, no compiler and no device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from bulkrun.ops.cpu.library import library

P = ParamSpec("P")
R = TypeVar("R")


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether ops over this tensor go through Triton."""
    return tensor.is_cuda and has_triton()


def uses_compiled(tensor: torch.Tensor) -> bool:
    """Whether ops over this tensor that have a compiled twin go through it. The first call may compile."""
    return tensor.is_cpu and library() is not None


def by_device(reference: Callable[P, R], *, has_triton: bool = True) -> Callable[P, R]:
    """The op whose reference is a function f of a module X below `bulkrun.ops`, and its twins of the same signature.

    They are `bulkrun.ops.triton.X.f`, unless a GPU has no use for one, and, where there is one, `bulkrun.ops.cpu.X.f`.
    The first positional argument is the tensor that decides.
    """
    module, name, compiled = triton_module(reference), reference.__name__, cpu_module(reference)

    @wraps(reference)
    def op(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        chosen = reference
        if has_triton and uses_triton(first):
            chosen = twin(module, name)
        elif compiled is not None and uses_compiled(first):
            chosen = twin(compiled, name)
        return chosen(*args, **kwargs)

    return op


@cache
def twin(module: str, name: str) -> Callable[..., Any]:
    """A twin, imported when it is first needed."""
    function: Callable[..., Any] = getattr(import_module(module), name)
    return function


def triton_module(reference: Callable[..., object]) -> str:
    """Where the twin of a reference lives."""
    return f"bulkrun.ops.triton.{_name(reference)}"


def cpu_module(reference: Callable[..., object]) -> str | None:
    """Where the compiled twin of a reference lives; None: it has none."""
    name = _name(reference)
    return f"bulkrun.ops.cpu.{name}" if (Path(__file__).parent / "cpu" / f"{name}.py").is_file() else None


def _name(reference: Callable[..., object]) -> str:
    """The name of a reference's module, whatever its room is, which its twins' modules have too."""
    return reference.__module__.rsplit(".", 1)[-1]


@cache
def has_triton() -> bool:
    """Whether ops over CUDA tensors have kernels at all; without Triton the references run there."""
    return find_spec("triton") is not None
