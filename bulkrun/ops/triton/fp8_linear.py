"""Products with fp8 weights on a GPU: tokens are quantized in one pass, then torch's own scaled product.

One row per program, so a token's scale and numbers never depend on the tokens beside it. Knows no model.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.matmul.fp8 import FP8, FP8_MAX
from bulkrun.ops.matmul.fp8_linear import fp8_linear as reference
from bulkrun.ops.triton.fp8 import to_dtype

_MULTIPLE = 16  # sides of a weight that torch's product takes
_FP8_MAX = tl.constexpr(FP8_MAX)
_LEAST_SCALE = tl.constexpr(torch.finfo(torch.float32).tiny)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference."""
    num_rows, size = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    x_fp8 = torch.empty(num_rows, size, dtype=FP8, device=x.device)
    scale_R1 = torch.empty(num_rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    if num_rows:
        _quantize_rows_kernel[(num_rows,)](
            x, x_fp8, scale_R1, x.stride(0), SIZE=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
        )
    return x_fp8, scale_R1


def fp8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """As the reference, but the product is rounded to bfloat16; by the reference for sizes that torch does not take.

    Sums stay float32: the fast mode of Hopper's fp8 units keeps 14 bits of them.
    """
    if any(size % _MULTIPLE for size in weight.shape):
        return reference(x, weight, weight_scale, bias)
    x_fp8, x_scale_T1 = quantize_rows(x)
    out_TO = torch._scaled_mm(
        x_fp8, weight.t(), x_scale_T1, weight_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=False
    ).to(x.dtype)
    return out_TO if bias is None else out_TO.add_(bias)


@triton.jit
def _quantize_rows_kernel(x_ptr, out_ptr, scale_ptr, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    index_C = tl.arange(0, BLOCK)
    is_real_C = index_C < SIZE
    x_C = tl.load(x_ptr + row * stride + index_C, mask=is_real_C, other=0.0).to(tl.float32)
    magnitude_C = tl.abs(x_C)
    largest = tl.max(magnitude_C, 0)
    largest = tl.where(tl.sum((magnitude_C != magnitude_C).to(tl.int32), 0) > 0, float("nan"), largest)
    scale = tl.div_rn(largest, _FP8_MAX)
    scale = tl.where(scale < _LEAST_SCALE, _LEAST_SCALE, scale)  # not a maximum, which would drop a NaN
    quantized_C = to_dtype(tl.div_rn(x_C, scale), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * SIZE + index_C, quantized_C, mask=is_real_C)
    tl.store(scale_ptr + row, scale)
