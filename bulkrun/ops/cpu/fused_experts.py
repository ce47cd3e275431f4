"""Experts whose weights are in panels, compiled for processors with AVX2. Contract: `ops.experts.moe`.

The panels are those of `panel_linear` and `int8_linear`: each expert's part of a weight is read from end to end by one
thread or shared out by columns. A token's bits depend on that token alone, on any number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import Literal

import torch

from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.four_bit_linear import pack_four_bits_
from bulkrun.ops.cpu.int8_linear import can_pack_int8, pack_int8_
from bulkrun.ops.cpu.panel_linear import can_pack_panels, fills_panels, pack_panels_
from bulkrun.ops.cpu.panel_matrix import Matrix, PanelWeight, num_inputs, panel_matrix
from bulkrun.ops.cpu.structs import struct_function
from bulkrun.ops.experts.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.experts.expert_sizes import ExpertSizes
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight
from bulkrun.ops.matmul.int8_linear import Int8Weight
from bulkrun.ops.matmul.weight_kinds import values_of

_ROWS = 16  # of a tile: each expert's rows begin at a multiple
_POINTERS = ("x", "weights", "ids", "gathered", "gated", "rows", "bytes", "row_scales", "out")
_SIZES = ("num_tokens", "top_k", "num_experts", "hidden_size", "intermediate_size")


class _Experts(ctypes.Structure):
    """`struct Experts` of fused_experts.cpp."""

    _fields_ = (
        ("gate_up", Matrix),
        ("down", Matrix),
        *[(x, c_void_p) for x in _POINTERS],
        *[(x, c_int64) for x in _SIZES],
        ("alpha", c_float),
        ("limit", c_float),
        ("is_gelu", c_int32),
        ("num_threads", c_int32),
    )


def can_pack_experts(weight_XOI: torch.Tensor, sizes: ExpertSizes, rows_dtype: torch.dtype | None = None) -> bool:
    """Whether `fused_experts` is compiled for experts of these sizes, of whose weights this is one."""
    return fit_panels(sizes) and can_pack_panels(weight_XOI.flatten(0, 1), rows_dtype)


def fit_panels(sizes: ExpertSizes) -> bool:
    """Whether experts of these sizes are whole panels, gates apart from ups; without gates there is no product."""
    return sizes.has_gates and fills_panels(sizes.hidden, sizes.intermediate)


def pack_experts_(weight_XOI: torch.Tensor) -> torch.Tensor:
    """Experts' weights, contiguous, in the memory they have: [X, O / 32, words, 32, 4 / itemsize]."""
    return pack_panels_(weight_XOI.flatten(0, 1)).unflatten(0, (weight_XOI.shape[0], -1))


def can_pack_int8_experts(sizes: ExpertSizes) -> bool:
    """The same for weights of int8."""
    return sizes.has_gates and all(can_pack_int8(*shape) for shape in sizes.shapes)


def pack_int8_experts_(weight: Int8Weight) -> Int8Weight:
    """Experts' weights [X, O, I] in panels, in the memory of their values; zeros: [X, O]."""
    num_experts = weight.values.shape[0]
    values, _, zeros = pack_int8_(Int8Weight(weight.values.flatten(0, 1), weight.scale.flatten(0, 1)))
    assert zeros is not None, "asked of sizes that can be packed"
    return Int8Weight(values.unflatten(0, (num_experts, -1)), weight.scale, zeros.view(num_experts, -1))


def pack_four_bit_experts_(weight: FourBitWeight) -> FourBitWeight:
    """Experts' weights [X, O, I] in panels, in the memory of their codes: [X, O / 32, ...]."""
    packed = pack_four_bits_(weight.each(lambda part: part.flatten(0, 1)))
    return packed.each(lambda part: part.unflatten(0, (len(weight.codes), -1)))


def fused_experts(
    x_TE: torch.Tensor,
    gate_up: PanelWeight,
    down: PanelWeight,
    weights_Tk: torch.Tensor,
    ids_Tk: torch.Tensor,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    activation: ClampedSwiglu | Literal["gelu_tanh"] | None = None,
) -> torch.Tensor:
    """As the reference, with weights from `pack_experts_`, `pack_int8_experts_` or `pack_four_bit_experts_`."""
    if name(x_TE.dtype) is None:  # of other types there are int8 weights alone
        biases = biases and (biases[0].float(), biases[1].float())
        return fused_experts(x_TE.float(), gate_up, down, weights_Tk, ids_Tk, biases, activation).to(x_TE.dtype)
    (num_tokens, size), top_k = x_TE.shape, ids_Tk.shape[1]
    num_experts, inner = values_of(down).shape[0], num_inputs(down)
    biases = biases and (biases[0].contiguous(), biases[1].contiguous())
    both = zip((gate_up, down), biases or (None, None), strict=True)
    matrices = [panel_matrix(weight, bias) for weight, bias in both]
    asked, out_TE = (x_TE.contiguous(), weights_Tk.contiguous(), ids_Tk.contiguous()), torch.empty_like(x_TE)
    pairs = num_tokens * top_k
    room = pairs + min(pairs, num_experts) * (_ROWS - 1)
    scratch = _scratch(x_TE, room + -room % _ROWS, inner, in_bytes=matrices[1].scales is not None)
    addresses = [None if one is None else one.data_ptr() for one in (*asked, *scratch, out_TE)]
    sizes = (num_tokens, top_k, num_experts, size, inner)
    swiglu = activation if isinstance(activation, ClampedSwiglu) else (0.0, 0.0)
    is_gelu = activation == "gelu_tanh"
    experts = _Experts(*matrices, *addresses, *sizes, *swiglu, is_gelu, torch.get_num_threads())
    _function(f"fused_experts_{name(x_TE.dtype)}")(ctypes.byref(experts))
    return out_TE


def _scratch(x_TE: torch.Tensor, room: int, inner: int, *, in_bytes: bool) -> list[torch.Tensor | None]:
    """What rows are gathered in, gates make, downs make; rows as bytes, and their scales."""
    size = x_TE.shape[1]
    gated, rows = x_TE.new_empty(room, inner), x_TE.new_empty(room, size)
    if not in_bytes:
        return [torch.empty_like(rows), gated, rows, None, None]
    return [None, gated, rows, torch.empty(room, max(size, inner), dtype=torch.uint8), torch.empty(room)]


@cache
def _function(op: str) -> Callable[..., None]:
    return struct_function(op, _Experts, Matrix)
