"""What brings a compiled layer's tokens together: attention or a gated delta net, each with its weights and its table.

A kind is a struct in C++ with a file of its own (attention_mixer.h, delta_net_mixer.h). Knows no step.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar

import torch

from bulkrun.ops.cpu import panel_matrix
from bulkrun.ops.cpu.gated_delta_rule import fits_delta_rule
from bulkrun.ops.cpu.stack_memory import PAD, Matrix, StackMemory
from bulkrun.ops.linear_attention.gated_delta_rule import NORM_EPS


class AttentionLayer(ctypes.Structure):
    """`struct AttentionLayer` of attention_mixer.h."""

    states = ()
    _fields_ = (
        ("qkv", panel_matrix.Matrix),
        *[(x, c_void_p) for x in ("qk_norm", "q_norm", "k_norm", "k_cache", "v_cache")],
        *[(x, c_int64) for x in ("window", "rotary")],
    )


class DeltaNetLayer(ctypes.Structure):
    """`struct DeltaNetLayer` of delta_net_mixer.h."""

    states = ("conv_state", "delta_state")  # where each is given that it keeps of a sequence
    _fields_ = (
        *[(x, panel_matrix.Matrix) for x in ("qkvz", "ba")],
        *[(x, c_void_p) for x in ("conv", "norm", "a_log", "dt_bias", "conv_state", "delta_state")],
        *[(x, c_int64) for x in ("num_heads", "num_key_heads", "size", "value_size", "num_taps")],
        ("norm_eps", c_float),
    )


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Gates, where there are any, queries, keys and values in one matrix. Norms that are None it has not."""

    kind: ClassVar[int] = 0  # of MixerKind

    qkv: Matrix
    qk_norm: torch.Tensor | None  # [H + K, D], of each head by itself
    projection_norms: tuple[torch.Tensor, torch.Tensor] | None  # [H D], [K D], of all queries as one and of all keys
    sliding_window: int | None
    rotary: int | None  # which of the step's rotary embeddings

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
            window=self.sliding_window or 0, rotary=-1 if self.rotary is None else self.rotary,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """A gated delta net's: H value heads of V dimensions read with K key heads of D."""

    kind: ClassVar[int] = 1  # of MixerKind

    qkvz: Matrix  # queries, keys and values, which are convolved, and the norm's gates
    ba: Matrix  # so narrow that a copy does not count
    conv: torch.Tensor  # [W, C]
    norm: torch.Tensor  # [V]
    a_log: torch.Tensor  # [H], float32
    dt_bias: torch.Tensor  # [H], float32
    num_key_heads: int
    key_size: int

    @property
    def matrix(self) -> Matrix:
        """The one that is read for every token."""
        return self.qkvz

    @property
    def num_heads(self) -> int:
        """Of values."""
        return self.a_log.numel()

    @property
    def value_dim(self) -> int:
        """Of all value heads."""
        return self.num_heads * self.norm.numel()

    @property
    def scratch(self) -> dict[str, int]:
        """Numbers that it leaves of each token in the stack's scratch buffers."""
        conv_dim, value_dim = self.conv.shape[1], self.value_dim
        return {
            "projected": conv_dim + value_dim, "ba": 2 * self.num_heads, "convolved": conv_dim, "corrected": value_dim
        }  # fmt: skip

    def table(self, memory: StackMemory) -> DeltaNetLayer:
        """What C++ is given of it, but for the states."""
        vectors = {"conv": self.conv, "norm": self.norm, "a_log": self.a_log, "dt_bias": self.dt_bias}
        return DeltaNetLayer(
            qkvz=memory.matrix(self.qkvz), ba=memory.matrix(self.ba),
            **{name: memory.keep(vector) for name, vector in vectors.items()},
            num_heads=self.num_heads, num_key_heads=self.num_key_heads, size=self.key_size,
            value_size=self.norm.numel(), num_taps=self.conv.shape[0], norm_eps=NORM_EPS,
        )  # fmt: skip


def can_mix_delta_net(num_heads: int, key_size: int, value_size: int) -> bool:
    """Whether it is compiled for such heads; the library must be there."""
    return fits_delta_rule(key_size, value_size) and not num_heads * value_size % PAD
