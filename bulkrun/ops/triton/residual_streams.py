"""Several residual streams in Triton, in one pass each: a row's sums never depend on the rows beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 1024


def with_rms_of(x: torch.Tensor, like_TE: torch.Tensor, min_mean_square: float) -> torch.Tensor:
    """As the reference, in one pass."""
    num_tokens, size = like_TE.shape
    x, like_TE = x.contiguous(), like_TE.contiguous()
    out, block = torch.empty_like(x), triton.next_power_of_2(size)
    if x.numel():
        _with_rms_kernel[(x.numel() // size,)](
            x, like_TE, out, min_mean_square, num_tokens,
            SIZE=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16),
        )  # fmt: skip
    return out


def predict_streams(streams_NTE: torch.Tensor, modes_TN: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As the reference."""
    num_streams, num_tokens, size = streams_NTE.shape
    streams_NTE, modes_TN, weight = streams_NTE.contiguous(), modes_TN.contiguous(), weight.contiguous()
    out_NTE = torch.empty_like(streams_NTE)
    if num_tokens:
        _predict_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            streams_NTE, modes_TN, weight, out_NTE, num_tokens * size, **_sizes(num_streams, size)
        )
    return out_NTE


def correct_streams(
    predicted_NTE: torch.Tensor, computed_TE: torch.Tensor, modes_TN: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """As the reference."""
    num_streams, num_tokens, size = predicted_NTE.shape
    predicted_NTE, computed_TE = predicted_NTE.contiguous(), computed_TE.contiguous()
    modes_TN, weight, out_NTE = modes_TN.contiguous(), weight.contiguous(), torch.empty_like(predicted_NTE)
    if num_tokens:
        _correct_kernel[(num_tokens, triton.cdiv(size, _BLOCK))](
            predicted_NTE, computed_TE, modes_TN, weight, out_NTE, num_tokens * size, **_sizes(num_streams, size)
        )
    return out_NTE


def _sizes(num_streams: int, size: int) -> dict[str, int]:
    return {"NUM": num_streams, "MODES": triton.next_power_of_2(num_streams), "SIZE": size, "BLOCK": _BLOCK}


@triton.jit
def _with_rms_kernel(
    x_ptr, like_ptr, out_ptr, min_mean_square, num_tokens, SIZE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    index_E = tl.arange(0, BLOCK)
    is_real_E = index_E < SIZE
    x_E = tl.load(x_ptr + row * SIZE + index_E, mask=is_real_E, other=0.0).to(tl.float32)
    like_E = tl.load(like_ptr + row % num_tokens * SIZE + index_E, mask=is_real_E, other=0.0).to(tl.float32)
    found = tl.maximum(tl.sum(x_E * x_E, 0) / SIZE, min_mean_square)
    wanted = tl.sum(like_E * like_E, 0) / SIZE
    tl.store(out_ptr + row * SIZE + index_E, x_E * tl.sqrt(wanted / found), mask=is_real_E)


@triton.jit
def _predict_kernel(
    streams_ptr, modes_ptr, weight_ptr, out_ptr, stride,
    NUM: tl.constexpr, MODES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, stride = tl.program_id(0).to(tl.int64), tl.cast(stride, tl.int64)
    index_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_E = index_E < SIZE
    row_ptr = streams_ptr + token * SIZE + index_E
    for n in tl.static_range(NUM):
        predicted_E = tl.load(row_ptr + n * stride, mask=is_real_E, other=0.0).to(tl.float32)
        for m in tl.static_range(NUM):
            coef = _of_modes(modes_ptr + token * NUM, weight_ptr + (n * NUM + m) * NUM, NUM, MODES)
            predicted_E += coef * tl.load(row_ptr + m * stride, mask=is_real_E, other=0.0).to(tl.float32)
        tl.store(out_ptr + n * stride + token * SIZE + index_E, predicted_E, mask=is_real_E)


@triton.jit
def _correct_kernel(
    predicted_ptr, computed_ptr, modes_ptr, weight_ptr, out_ptr, stride,
    NUM: tl.constexpr, MODES: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, stride = tl.program_id(0).to(tl.int64), tl.cast(stride, tl.int64)
    index_E = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real_E = index_E < SIZE
    at_E = token * SIZE + index_E
    computed_E = tl.load(computed_ptr + at_E, mask=is_real_E, other=0.0).to(tl.float32)
    news_E = computed_E - tl.load(predicted_ptr + at_E, mask=is_real_E, other=0.0).to(tl.float32)
    for n in tl.static_range(NUM):
        predicted_E = tl.load(predicted_ptr + n * stride + at_E, mask=is_real_E, other=0.0).to(tl.float32)
        gain = _of_modes(modes_ptr + token * NUM, weight_ptr + n * NUM, NUM, MODES) + 1.0
        tl.store(out_ptr + n * stride + at_E, predicted_E + gain * news_E, mask=is_real_E)


@triton.jit
def _of_modes(modes_ptr, weight_ptr, NUM: tl.constexpr, MODES: tl.constexpr):
    """The product of a token's modes with a row of the weight."""
    index_N = tl.arange(0, MODES)
    modes_N = tl.load(modes_ptr + index_N, mask=index_N < NUM, other=0.0).to(tl.float32)
    weight_N = tl.load(weight_ptr + index_N, mask=index_N < NUM, other=0.0).to(tl.float32)
    return tl.sum(modes_N * weight_N, 0)
