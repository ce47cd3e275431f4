"""Numbers of four bits in Triton: one pass, read as codes and written as what they stand for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.unpack_codes import CODES_PER_BYTE

_BLOCK = 1024


def unpack_codes(
    codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, codebook: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """As the reference; what it reads is contiguous."""
    *outputs, num_bytes = codes.shape
    size, num_groups = num_bytes * CODES_PER_BYTE, scale.shape[-1]
    numbers = torch.empty(*outputs, size, dtype=dtype, device=codes.device)
    num_rows = codes.numel() // max(num_bytes, 1)
    if num_rows:
        _unpack_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            codes, scale, zero, codebook, numbers,
            SIZE=size, NUM_GROUPS=num_groups, GROUP_SIZE=size // num_groups, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
    return numbers


@triton.jit
def _unpack_kernel(
    codes_ptr,
    scale_ptr,
    zero_ptr,  # None: zeros
    codebook_ptr,
    numbers_ptr,
    SIZE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index_I = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_I = index_I < SIZE
    byte_I = tl.load(codes_ptr + row * (SIZE // 2) + index_I // 2, mask=is_real_I, other=0)
    code_I = (byte_I.to(tl.int32) >> (index_I % 2 * 4)) & 15
    group_I = row * NUM_GROUPS + index_I // GROUP_SIZE
    number_I = tl.load(codebook_ptr + code_I)
    if zero_ptr is not None:
        number_I -= tl.load(zero_ptr + group_I, mask=is_real_I, other=0).to(tl.float32)
    number_I *= tl.load(scale_ptr + group_I, mask=is_real_I, other=0.0).to(tl.float32)
    tl.store(numbers_ptr + row * SIZE + index_I, number_I.to(numbers_ptr.dtype.element_ty), mask=is_real_I)
