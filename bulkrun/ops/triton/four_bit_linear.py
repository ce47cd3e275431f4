"""Products with weights of four bits on a GPU: of few rows in one kernel, of many as torch's own over numbers unpacked
before, which takes the memory of the matrix for a moment.
"""

from __future__ import annotations

import torch

from bulkrun.ops.matmul.four_bit_linear import four_bit_linear as reference
from bulkrun.ops.matmul.four_bit_weight import FourBitWeight
from bulkrun.ops.triton.four_bit_product import multiply

# Unpacking in registers is done anew for every 128 rows; before the product it writes and reads the numbers once. By
# arithmetic for a Hopper GPU, not measured.
_FEW_ROWS = 1024


def four_bit_linear(x: torch.Tensor, weight: FourBitWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """As the reference, but for the order of sums."""
    if len(x) > _FEW_ROWS or weight.int8 is not None or weight.form == "table":
        return reference(x, weight, bias)
    out = x.new_empty(len(x), weight.codes.shape[0])
    multiply(x.contiguous(), weight, bias, out, None)
    return out
