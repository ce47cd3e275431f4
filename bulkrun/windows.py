"""Which of the keys before it a query sees, where not all: what configs say, attention keeps to, and costs count.

Knows no tensors: positions may be numbers or tensors of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import torch


class Chunks(NamedTuple):
    """Positions lie in chunks of one size, and a query sees the keys of its own chunk alone (Llama 4)."""

    size: int


Window = int | Chunks  # a number: those less than so many positions away
P = TypeVar("P", int, "torch.Tensor")


def first_seen(position: P, window: Window) -> P:
    """The first key that queries at these positions see; below 0: the first of all."""
    if isinstance(window, Chunks):
        return position - position % window.size
    return position - window + 1


def most_seen(window: Window) -> int:
    """The most keys that a query sees."""
    return window.size if isinstance(window, Chunks) else window


def kernel_window(window: Window | None) -> int:
    """As one number, for kernels: of chunks their size below zero; 0: no window."""
    return -window.size if isinstance(window, Chunks) else window or 0
