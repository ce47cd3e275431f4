"""What brings a compiled layer's tokens together over the cache: attention, with its weights and its table.

It is a struct in C++ with a file of its own (attention_mixer.h); what keeps a state instead: `state_mixers`. Knows no
step.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch

from bulkrun.ops.cpu import panel_matrix
from bulkrun.ops.cpu.stack_memory import Matrix, StackMemory
from bulkrun.windows import Window, kernel_window


class AttentionLayer(ctypes.Structure):
    """`struct AttentionLayer` of attention_mixer.h."""

    states = ()
    _fields_ = (
        ("qkv", panel_matrix.Matrix),
        *[(x, c_void_p) for x in ("qk_norm", "q_norm", "k_norm", "k_cache", "v_cache")],
        *[(x, c_int64) for x in ("window", "rotary", "num_kv_heads", "head_dim")],
        *[(x, c_int32) for x in ("has_own_keys", "keys_are_values", "norms_values")],
    )


_AS_IT_IS = ("num_kv_heads", "head_dim", "has_own_keys", "keys_are_values", "norms_values")


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Gates, where there are any, queries, keys and values in one matrix. Norms that are None it has not."""

    kind: ClassVar[int] = 0  # of MixerKind

    qkv: Matrix
    num_kv_heads: int
    head_dim: int
    qk_norm: torch.Tensor | None  # [H + K, D], of each head by itself, or [H + 2 K, D], of values too
    projection_norms: tuple[torch.Tensor, torch.Tensor] | None  # [H D], [K D], of all queries as one and of all keys
    sliding_window: Window | None
    rotary: int | None  # which of the step's rotary embeddings
    has_own_keys: bool = True  # else there are queries alone, and the caches are an earlier layer's
    keys_are_values: bool = False  # there are no others
    norms_values: bool = False

    @property
    def matrix(self) -> Matrix:
        """The one that is read for every token."""
        return self.qkv

    def table(self, memory: StackMemory) -> AttentionLayer:
        """What C++ is given of it, but for the caches."""
        q_norm, k_norm = self.projection_norms or (None, None)
        norms = {"qk_norm": self.qk_norm, "q_norm": q_norm, "k_norm": k_norm}
        return AttentionLayer(
            qkv=memory.matrix(self.qkv),
            **{name: None if norm is None else memory.keep(norm) for name, norm in norms.items()},
            window=kernel_window(self.sliding_window), rotary=-1 if self.rotary is None else self.rotary,
            **{name: getattr(self, name) for name in _AS_IT_IS},
        )  # fmt: skip
