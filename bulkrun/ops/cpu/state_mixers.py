"""What brings a compiled layer's tokens together and keeps a state, each kind with its weights and its table.

A kind is a struct in C++ with a file of its own (delta_net_mixer.h, short_conv_mixer.h, mamba2_mixer.h,
mamba_mixer.h). Knows no step.
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
from bulkrun.ops.cpu.state_space import fits_state_space
from bulkrun.ops.linear_attention.gated_delta_rule import NORM_EPS


class DeltaNetLayer(ctypes.Structure):
    """`struct DeltaNetLayer` of delta_net_mixer.h."""

    states = ("conv_state", "delta_state")  # where each is given that it keeps of a sequence
    _fields_ = (
        *[(x, panel_matrix.Matrix) for x in ("qkvz", "ba")],
        *[(x, c_void_p) for x in ("conv", "norm", "a_log", "dt_bias", "conv_state", "delta_state")],
        *[(x, c_int64) for x in ("num_heads", "num_key_heads", "size", "value_size", "num_taps")],
        *[(x, c_float) for x in ("norm_eps", "beta_scale", "out_norm_eps")],
    )


class ShortConvLayer(ctypes.Structure):
    """`struct ShortConvLayer` of short_conv_mixer.h."""

    states = ("conv_state",)
    _fields_ = (
        ("in_proj", panel_matrix.Matrix),
        *[(x, c_void_p) for x in ("conv", "conv_bias", "conv_state")],
        ("num_taps", c_int64),
    )


class Mamba2Layer(ctypes.Structure):
    """`struct Mamba2Layer` of mamba2_mixer.h."""

    states = ("conv_state", "matrix_state")
    _fields_ = (
        ("in_proj", panel_matrix.Matrix),
        *[(x, c_void_p) for x in ("conv", "conv_bias", "norm", "a_log", "dt_bias", "d", "conv_state", "matrix_state")],
        *[(x, c_int64) for x in ("num_heads", "num_groups", "size", "value_size", "num_taps")],
    )


class MambaLayer(ctypes.Structure):
    """`struct MambaLayer` of mamba_mixer.h."""

    states = ("conv_state", "matrix_state")
    _fields_ = (
        *[(x, panel_matrix.Matrix) for x in ("in_proj", "x_proj", "dt_proj")],
        *[(x, c_void_p) for x in ("conv", "conv_bias", "dt_norm", "b_norm", "c_norm")],
        *[(x, c_void_p) for x in ("rate", "dt_bias", "d", "conv_state", "matrix_state")],
        *[(x, c_int64) for x in ("num_heads", "size", "value_size", "step_rank", "num_taps")],
        ("norm_eps", c_float),
    )


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
    beta_scale: float  # see `ops.gated_delta_rule`
    norm_eps: float  # of the gated norm

    @property
    def matrix(self) -> Matrix:
        """The one that is read for every token."""
        return self.qkvz

    @property
    def num_heads(self) -> int:
        """Of values."""
        return self.a_log.numel()

    @property
    def mixed_size(self) -> int:
        """Numbers of a token that the output projection multiplies: those of all value heads."""
        return self.num_heads * self.norm.numel()

    @property
    def scratch(self) -> dict[str, int]:
        """Numbers that it leaves of each token in the stack's scratch buffers."""
        conv_dim, value_dim = self.conv.shape[1], self.mixed_size
        return {
            "projected": conv_dim + value_dim, "narrow": 2 * self.num_heads, "convolved": conv_dim,
            "corrected": value_dim,
        }  # fmt: skip

    def table(self, memory: StackMemory) -> DeltaNetLayer:
        """What C++ is given of it, but for the states."""
        vectors = {"conv": self.conv, "norm": self.norm, "a_log": self.a_log, "dt_bias": self.dt_bias}
        return DeltaNetLayer(
            qkvz=memory.matrix(self.qkvz), ba=memory.matrix(self.ba),
            **{name: memory.keep(vector) for name, vector in vectors.items()},
            num_heads=self.num_heads, num_key_heads=self.num_key_heads, size=self.key_size,
            value_size=self.norm.numel(), num_taps=self.conv.shape[0], norm_eps=NORM_EPS,
            beta_scale=self.beta_scale, out_norm_eps=self.norm_eps,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShortConvWeights:
    """A gated short convolution's."""

    kind: ClassVar[int] = 2  # of MixerKind

    in_proj: Matrix  # gates before it, gates after it, what is convolved
    conv: torch.Tensor  # [W, E]
    conv_bias: torch.Tensor | None  # [E]

    @property
    def matrix(self) -> Matrix:
        """The one that is read for every token."""
        return self.in_proj

    @property
    def mixed_size(self) -> int:
        """Numbers of a token that the output projection multiplies."""
        return self.conv.shape[1]

    @property
    def scratch(self) -> dict[str, int]:
        """Numbers that it leaves of each token in the stack's scratch buffers."""
        return {"projected": 3 * self.mixed_size, "convolved": self.mixed_size}

    def table(self, memory: StackMemory) -> ShortConvLayer:
        """What C++ is given of it, but for the state."""
        return ShortConvLayer(
            in_proj=memory.matrix(self.in_proj), conv=memory.keep(self.conv),
            conv_bias=None if self.conv_bias is None else memory.keep(self.conv_bias), num_taps=self.conv.shape[0],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mamba2Weights:
    """Mamba 2's: H heads of P dimensions with states of N rows, in G groups."""

    kind: ClassVar[int] = 3  # of MixerKind

    in_proj: Matrix  # the norm's gates, what is convolved, a step for each head
    conv: torch.Tensor  # [W, C]
    conv_bias: torch.Tensor | None  # [C]
    norm: torch.Tensor  # [G, H P / G]
    a_log: torch.Tensor  # [H], float32
    dt_bias: torch.Tensor  # [H], float32
    d: torch.Tensor  # [H], float32

    @property
    def matrix(self) -> Matrix:
        """The one that is read for every token."""
        return self.in_proj

    @property
    def mixed_size(self) -> int:
        """Numbers of a token that the output projection multiplies: those of all heads."""
        return self.norm.numel()

    @property
    def scratch(self) -> dict[str, int]:
        """Numbers that it leaves of each token in the stack's scratch buffers."""
        inner, conv_dim = self.mixed_size, self.conv.shape[1]
        return {"projected": inner + conv_dim + self.d.numel(), "convolved": conv_dim, "corrected": inner}

    def table(self, memory: StackMemory) -> Mamba2Layer:
        """What C++ is given of it, but for the states."""
        num_heads, num_groups, inner = self.d.numel(), self.norm.shape[0], self.mixed_size
        vectors = {"conv": self.conv, "norm": self.norm, "a_log": self.a_log, "dt_bias": self.dt_bias, "d": self.d}
        return Mamba2Layer(
            in_proj=memory.matrix(self.in_proj), **{name: memory.keep(vector) for name, vector in vectors.items()},
            conv_bias=None if self.conv_bias is None else memory.keep(self.conv_bias),
            num_heads=num_heads, num_groups=num_groups, size=(self.conv.shape[1] - inner) // (2 * num_groups),
            value_size=inner // num_heads, num_taps=self.conv.shape[0],
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """Mamba's, the first kind: C channels with states of N numbers, P of them one matrix."""

    kind: ClassVar[int] = 4  # of MixerKind

    in_proj: Matrix  # what is convolved, and its gates
    x_proj: Matrix  # so narrow that a copy does not count: steps in short, what writes states and what reads them
    dt_proj: Matrix  # the same, of steps
    conv: torch.Tensor  # [W, C]
    conv_bias: torch.Tensor | None  # [C]
    norms: tuple[torch.Tensor, ...] | None  # of the parts that x_proj gives, each of its width
    norm_eps: float
    rate: torch.Tensor  # [N, C], float32
    dt_bias: torch.Tensor  # [C], float32
    d: torch.Tensor  # [C], float32
    step_rank: int
    head_dim: int  # P

    @property
    def matrix(self) -> Matrix:
        """The one that is read for every token."""
        return self.in_proj

    @property
    def mixed_size(self) -> int:
        """Numbers of a token that the output projection multiplies: those of all channels."""
        return self.d.numel()

    @property
    def scratch(self) -> dict[str, int]:
        """Numbers that it leaves of each token in the stack's scratch buffers."""
        inner, narrow = self.mixed_size, self.step_rank + 2 * len(self.rate)
        return {
            "projected": 2 * inner, "narrow": narrow, "steps": self.step_rank + -self.step_rank % PAD,
            "convolved": inner, "corrected": inner,
        }  # fmt: skip

    def table(self, memory: StackMemory) -> MambaLayer:
        """What C++ is given of it, but for the states."""
        matrices = {"in_proj": self.in_proj, "x_proj": self.x_proj, "dt_proj": self.dt_proj}
        vectors = {"conv": self.conv, "rate": self.rate, "dt_bias": self.dt_bias, "d": self.d}
        vectors |= dict(zip(("dt_norm", "b_norm", "c_norm"), self.norms or (), strict=False))
        return MambaLayer(
            **{name: memory.matrix(matrix) for name, matrix in matrices.items()},
            **{name: memory.keep(vector) for name, vector in vectors.items()},
            conv_bias=None if self.conv_bias is None else memory.keep(self.conv_bias),
            num_heads=self.mixed_size // self.head_dim, size=len(self.rate), value_size=self.head_dim,
            step_rank=self.step_rank, num_taps=self.conv.shape[0], norm_eps=self.norm_eps,
        )  # fmt: skip


StateWeights = DeltaNetWeights | ShortConvWeights | Mamba2Weights | MambaWeights


def can_mix_delta_net(num_heads: int, key_size: int, value_size: int) -> bool:
    """Whether it is compiled for such heads; the library must be there."""
    return fits_delta_rule(key_size, value_size) and not num_heads * value_size % PAD


def can_mix_short_conv(hidden_size: int) -> bool:
    """Whether it is compiled for so many channels."""
    return not hidden_size % PAD


def can_mix_mamba(num_heads: int, state_size: int, head_dim: int) -> bool:
    """Whether it is compiled for such heads, of the second kind, or channels, so many together; the library must be
    there."""
    return fits_state_space(state_size, head_dim) and not num_heads * head_dim % PAD
