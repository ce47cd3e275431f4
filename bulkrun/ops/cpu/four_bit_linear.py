"""Products with weights of four bits in panels, compiled for AVX2. Contract: `ops.matmul.four_bit_linear`.

The panels are those of `panel_linear`, with eight codes in 32 bits. A panel is unpacked to the words that are
multiplied, float32, bf16 or int8, by the thread that multiplies it, just before: memory gives four bits, and a result
has the bits that a weight dequantized beforehand would give.
"""

from __future__ import annotations

import torch

from bulkrun.ops.cpu.int8_linear import can_pack_int8, multiply_int8_panels
from bulkrun.ops.cpu.panel_linear import PANEL, compiles_panels, multiply_panels, pack_panels_
from bulkrun.ops.cpu.panel_matrix import panel_matrix
from bulkrun.ops.matmul.four_bit_linear import four_bit_linear as reference
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight

_CODES = 8  # in 32 bits
_PLAIN_NDIM = 2


def can_pack_four_bits(columns: int, size: int, group_size: int, dtype: torch.dtype, *, int8: bool) -> bool:
    """Whether products of rows of this size and dtype, or of these rows in int8, with so many columns are compiled.

    The first call may compile.
    """
    if columns % PANEL or size % PANEL or size % group_size or group_size % _CODES:
        return False
    return compiles_panels(dtype) and (not int8 or can_pack_int8(columns, size))


def pack_four_bits_(weight: FourBitWeight) -> FourBitWeight:
    """A weight [O, I] in panels, in the memory of its codes, which are no longer plain then; one that can be packed.

    codes: uint8 [O / 32, I / 8, 32, 4]. scale, zero: [O / 32, groups, 32]. A zero point that all groups have is taken
    from the codebook instead: those are whole numbers, so nothing is rounded, and unpacking takes a quarter less time.
    """
    zero, codebook = weight.zero, weight.codebook
    if zero is not None and bool((zero == (one := zero.flatten()[0])).all()):
        zero, codebook = None, codebook - one
    grid = None if zero is None else _grid(zero)
    return weight._replace(codes=pack_panels_(weight.codes), scale=_grid(weight.scale), zero=grid, codebook=codebook)


def four_bit_linear(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `bulkrun.ops.matmul.four_bit_linear.four_bit_linear`; weight: in panels too."""
    if weight.codes.ndim == _PLAIN_NDIM:
        return reference(x, weight, bias)
    multiply = multiply_panels if weight.int8 is None else multiply_int8_panels
    return multiply(x, panel_matrix(weight, bias), weight.codes.shape[0] * PANEL)


def _grid(of_rows: torch.Tensor) -> torch.Tensor:
    return of_rows.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
