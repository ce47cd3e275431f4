"""Numbers of four bits out of words that lie in registers (`four_bit_order`), by twos where that loses nothing.

Numbers of 16 bits come in pairs, the halves of an int32: one instruction works on both. A whole number in the low bits
of a half is a float below the normal ones, and an E2M1 a float whose exponent is too small: one multiplication makes
either the number that is meant. Knows no product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.ops.matmul.four_bit_weight import SHIFTED_SCALES
from bulkrun.ops.triton.interpreted import IS_INTERPRETED

_MAGIC = tl.constexpr(0x4B000000)  # 2 ** 23 as a float32: its low bits count ones
_E2M1_BITS = tl.constexpr(-0x80000000 | 0x01C00000)
_E2M1_SHORT = tl.constexpr(126)  # the power of two that a float lacks whose exponent and fraction are an E2M1's
_IN_BOTH = tl.constexpr(0x00010001)
# 2 ** 127 and 2 ** 15, in both halves, make whole numbers of floats with such low bits, divided by `SHIFTED_SCALES`.
_RAISE_BFLOAT16, _RAISE_FLOAT16 = tl.constexpr(0x7F007F00), tl.constexpr(0x78007800)
_SIGNS = tl.constexpr(-0x80000000 | 0x00008000)  # alone two zeros that change nothing they are added to
_SHIFT_BFLOAT16 = tl.constexpr(SHIFTED_SCALES[torch.bfloat16])
_SHIFT_FLOAT16 = tl.constexpr(SHIFTED_SCALES[torch.float16])


@triton.jit
def code_pairs(word_NW, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """int32 [N, K / 2]: each code in the low bits of a half, the first in the lower one; of words [N, K / 8]."""
    first_NW, second_NW = word_NW & 0x000F000F, (word_NW >> 4) & 0x000F000F
    third_NW, fourth_NW = (word_NW >> 8) & 0x000F000F, (word_NW >> 12) & 0x000F000F
    pair_NWxy = tl.join(tl.join(first_NW, third_NW), tl.join(second_NW, fourth_NW))
    pair_NBtwxy = tl.reshape(pair_NWxy, [BLOCK_N, BLOCK_K // 64, 4, 2, 2, 2])
    return tl.reshape(tl.permute(pair_NBtwxy, [0, 1, 3, 4, 5, 2]), [BLOCK_N, BLOCK_K // 2])


@triton.jit
def four_bit_numbers(
    word_NW,
    scale_NG,
    dtype: tl.constexpr,
    ARE_WHOLE: tl.constexpr,
    IN_PAIRS: tl.constexpr,  # computed in `dtype`, which loses nothing, else in float32
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    G: tl.constexpr,
):
    """[N, K] in `dtype`, of the words of N outputs and the scales of their G groups of inputs."""
    pair_NGP = tl.reshape(code_pairs(word_NW, BLOCK_N, BLOCK_K), [BLOCK_N, G, BLOCK_K // G // 2])
    if IN_PAIRS:
        if ARE_WHOLE:
            pair_NGP = _whole_pairs(pair_NGP, scale_NG, dtype)
        else:
            pair_NGP = _e2m1_pairs(pair_NGP, scale_NG)
        half_NGPx = tl.join(pair_NGP.to(tl.int16), (pair_NGP >> 16).to(tl.int16))
        return tl.reshape(half_NGPx, [BLOCK_N, BLOCK_K]).to(dtype, bitcast=True)
    code_NGK = tl.reshape(tl.join(pair_NGP & 15, pair_NGP >> 16), [BLOCK_N, G, BLOCK_K // G])
    if ARE_WHOLE:
        number_NGK = (code_NGK | _MAGIC).to(tl.float32, bitcast=True)
        zero_NG = ((scale_NG & 15) | _MAGIC).to(tl.float32, bitcast=True)
        number_NGK = (number_NGK - zero_NG[:, :, None]) * (scale_NG & -16).to(tl.float32, bitcast=True)[:, :, None]
    else:  # the sign to the sign, two bits to the exponent's lowest, one to the fraction's highest
        number_NGK = (((code_NGK << 28) >> 6) & _E2M1_BITS).to(tl.float32, bitcast=True)
        number_NGK *= ((scale_NG.to(tl.int32) + _E2M1_SHORT) << 23).to(tl.float32, bitcast=True)[:, :, None]
    return tl.reshape(number_NGK, [BLOCK_N, BLOCK_K]).to(dtype)


@triton.jit
def _whole_pairs(pair_NGP, scale_NG, dtype: tl.constexpr):
    """Codes less zero points, which is exact, times scales."""
    zero_NG, factor_NG = (scale_NG & 15) * _IN_BOTH, (scale_NG & -16).to(tl.float32, bitcast=True)
    if dtype == tl.bfloat16:
        bits_NG = (factor_NG * _SHIFT_BFLOAT16).to(tl.int32, bitcast=True)
        factor_NG = (bits_NG & -65536) | ((bits_NG >> 16) & 65535)
        zero_NG = multiply_add(zero_NG, _RAISE_BFLOAT16 | _SIGNS, _SIGNS, dtype)
        pair_NGP = multiply_add(pair_NGP, _RAISE_BFLOAT16, zero_NG[:, :, None], dtype)
    else:
        bits_NG = (factor_NG * _SHIFT_FLOAT16).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
        factor_NG = (bits_NG & 65535) * _IN_BOTH
        zero_NG = multiply_add(zero_NG, _RAISE_FLOAT16 | _SIGNS, _SIGNS, dtype)
        pair_NGP = multiply_add(pair_NGP, _RAISE_FLOAT16, zero_NG[:, :, None], dtype)
    return multiply_add(pair_NGP, factor_NG[:, :, None], _SIGNS, dtype)


@triton.jit
def _e2m1_pairs(pair_NGP, scale_NG):
    """In bfloat16, which has every scale."""
    number_NGP = ((pair_NGP << 12) & _SIGNS) | ((pair_NGP << 6) & 0x01C001C0)
    factor_NG = ((scale_NG.to(tl.int32) + _E2M1_SHORT) << 7) * _IN_BOTH
    return multiply_add(number_NGP, factor_NG[:, :, None], _SIGNS, tl.bfloat16)


@triton.jit
def multiply_add(a, b, c, dtype: tl.constexpr):
    """a * b + c of both halves, rounded once; int32, of shapes that fit `a`."""
    if IS_INTERPRETED:
        low = _half(a, 0, dtype) * _half(b, 0, dtype) + _half(c, 0, dtype)
        high = _half(a, 1, dtype) * _half(b, 1, dtype) + _half(c, 1, dtype)
        return _bits(low, dtype) | (_bits(high, dtype) << 16)
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _half(pair, NUMBER: tl.constexpr, dtype: tl.constexpr):
    """float64 of the lower half, 0, or the upper one, 1."""
    bits = (pair >> (16 * NUMBER)) & 65535
    if dtype == tl.bfloat16:
        return (bits << 16).to(tl.float32, bitcast=True).to(tl.float64)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float64)


@triton.jit
def _bits(number, dtype: tl.constexpr):
    """int32: of a float64, those of its nearest number in 16 bits; to bfloat16 by way of float32, which holds it."""
    if dtype == tl.bfloat16:
        bits = number.to(tl.float32).to(tl.int32, bitcast=True)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 65535
    return number.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 65535
