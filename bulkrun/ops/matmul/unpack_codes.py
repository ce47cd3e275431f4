"""Numbers of four bits as they are stored, a code for each, and what codes stand for.

A number is (codebook[code] - zero point) * scale, both of the group of inputs that it belongs to: GPTQ, AWQ and the
like, whose codes are whole numbers, and MXFP4, whose codebook is E2M1. This is the contract and the pure-torch
reference. Knows no product.
"""

from __future__ import annotations

import torch

from bulkrun.ops.matmul.four_bit_order import in_line

CODES_PER_BYTE = 2


def unpack_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    codebook: torch.Tensor,
    dtype: torch.dtype,
    *,
    are_in_words: bool = False,
) -> torch.Tensor:
    """The numbers [..., O, I], computed in float32 and rounded once.

    codes: uint8 [..., O, I / 2], two to a byte, the first in its low bits, or in the order of `four_bit_order`. scale:
    float32 or bfloat16 [..., O, groups]. zero: uint8 of the same shape; None: zeros. codebook: float32 [16].
    """
    codes = in_line(codes) if are_in_words else codes
    each = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    grouped = codebook[each.int()].unflatten(-1, (scale.shape[-1], -1))
    if zero is not None:
        grouped = grouped - zero.float().unsqueeze(-1)
    return (grouped * scale.float().unsqueeze(-1)).flatten(-2).to(dtype)
