"""A matrix in panels, of whatever numbers, as compiled calls take it: addresses of what it consists of. Knows no op."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch

from bulkrun.ops.matmul.four_bit_weight import FourBitWeight
from bulkrun.ops.matmul.int8_linear import Int8Weight
from bulkrun.ops.matmul.weight_kinds import numbers_per_item, values_of

PanelWeight = torch.Tensor | Int8Weight | FourBitWeight  # in panels


class Matrix(ctypes.Structure):
    """`struct Matrix` of panel_matrix.h: addresses, or None."""

    _fields_ = (
        *[(x, c_void_p) for x in ("panels", "bias", "scales", "zeros")],
        *[(x, c_void_p) for x in ("codebook", "group_scales", "group_zeros", "byte_factors")],
        *[(x, c_int64) for x in ("group_size", "scale_bytes", "is_narrow")],
    )


def panel_matrix(weight: PanelWeight, bias: torch.Tensor | None) -> Matrix:
    """Of a matrix, or of all experts' matrices; what it points to must be kept (`tensors_of`)."""
    if isinstance(weight, Int8Weight):
        return Matrix(_at(weight.values), _at(bias), _at(weight.scale), _at(weight.zeros))
    if isinstance(weight, torch.Tensor):
        return Matrix(_at(weight), _at(bias), is_narrow=weight.dtype == torch.bfloat16)
    int8, num_groups = weight.int8, weight.scale.shape[-2]
    factor, scale, zeros = (None, None, None) if int8 is None else (_at(part) for part in int8)
    return Matrix(
        _at(weight.codes), _at(bias), scale, zeros,
        _at(weight.codebook), _at(weight.scale), _at(weight.zero), factor,
        num_inputs(weight) // num_groups, weight.scale.element_size(),
    )  # fmt: skip


def tensors_of(weight: PanelWeight) -> list[torch.Tensor]:
    """What a weight consists of."""
    if isinstance(weight, torch.Tensor):
        return [weight]
    rest = (weight.int8 or ()) if isinstance(weight, FourBitWeight) else ()
    return [part for part in (*weight, *rest) if isinstance(part, torch.Tensor)]


def num_columns(weight: PanelWeight) -> int:
    """How many columns its panels have."""
    num_panels, _, columns, _ = values_of(weight).shape
    return num_panels * columns


def num_inputs(weight: PanelWeight) -> int:
    """How many numbers a row has."""
    *_, words, _, per_word = values_of(weight).shape
    return words * per_word * numbers_per_item(weight)


def _at(tensor: torch.Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "compiled calls know no strides"
    return tensor.data_ptr()
