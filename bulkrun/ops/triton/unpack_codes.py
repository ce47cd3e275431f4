"""Numbers of four bits in Triton: one pass, read as codes and written as what they stand for."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.matmul.unpack_codes import CODES_PER_BYTE
from bulkrun.ops.triton.four_bit_numbers import code_pairs

_BLOCK = 1024


def unpack_codes(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    codebook: torch.Tensor,
    dtype: torch.dtype,
    *,
    are_in_words: bool = False,
) -> torch.Tensor:
    """As the reference; what it reads is contiguous."""
    *outputs, num_bytes = codes.shape
    size, num_groups = num_bytes * CODES_PER_BYTE, scale.shape[-1]
    numbers = torch.empty(*outputs, size, dtype=dtype, device=codes.device)
    num_rows = codes.numel() // max(num_bytes, 1)
    if num_rows:
        _unpack_kernel[(num_rows, triton.cdiv(size, _BLOCK))](
            codes.view(torch.int32) if are_in_words else codes, scale, zero, codebook, numbers, SIZE=size,
            NUM_GROUPS=num_groups, GROUP_SIZE=size // num_groups, ARE_IN_WORDS=are_in_words, BLOCK=_BLOCK, num_warps=4,
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
    ARE_IN_WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    index_I = first + tl.arange(0, BLOCK)
    if ARE_IN_WORDS:
        index_W = first // 8 + tl.arange(0, BLOCK // 8)
        word_W = tl.load(codes_ptr + row * (SIZE // 8) + index_W, mask=index_W < SIZE // 8, other=0)
        pair_P = tl.reshape(code_pairs(word_W[None, :], 1, BLOCK), [BLOCK // 2])
        code_I = tl.reshape(tl.join(pair_P & 15, pair_P >> 16), [BLOCK])
    else:
        index_B = first // 2 + tl.arange(0, BLOCK // 2)
        byte_B = tl.load(codes_ptr + row * (SIZE // 2) + index_B, mask=index_B < SIZE // 2, other=0).to(tl.int32)
        code_I = tl.reshape(tl.join(byte_B & 15, byte_B >> 4), [BLOCK])
    number_I = tl.load(codebook_ptr + code_I)
    if BLOCK % GROUP_SIZE == 0:  # each scale is read once
        index_G = first // GROUP_SIZE + tl.arange(0, BLOCK // GROUP_SIZE)
        number_GI = tl.reshape(number_I, [BLOCK // GROUP_SIZE, GROUP_SIZE])
        is_real_G, place_G = index_G < NUM_GROUPS, row * NUM_GROUPS + index_G
        if zero_ptr is not None:
            number_GI -= tl.load(zero_ptr + place_G, mask=is_real_G, other=0).to(tl.float32)[:, None]
        number_GI *= tl.load(scale_ptr + place_G, mask=is_real_G, other=0.0).to(tl.float32)[:, None]
        number_I = tl.reshape(number_GI, [BLOCK])
    else:
        is_real_I, place_I = index_I < SIZE, row * NUM_GROUPS + index_I // GROUP_SIZE
        if zero_ptr is not None:
            number_I -= tl.load(zero_ptr + place_I, mask=is_real_I, other=0).to(tl.float32)
        number_I *= tl.load(scale_ptr + place_I, mask=is_real_I, other=0.0).to(tl.float32)
    tl.store(numbers_ptr + row * SIZE + index_I, number_I.to(numbers_ptr.dtype.element_ty), mask=index_I < SIZE)
