"""Root-mean-square normalization in Triton, one row per program: a row's sums never depend on the rows beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As the reference; the weight's shape must be the end of x's."""
    rows = _rows(x)
    out = torch.empty_like(rows, memory_format=torch.contiguous_format)
    _launch(rows, None, weight, out, None, eps, x.shape)
    return out.view(x.shape)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference: one pass reads both and writes both."""
    rows, residual_rows = _rows(x), _rows(residual)
    out, total = torch.empty_like(rows), torch.empty_like(rows)
    _launch(rows, residual_rows, weight, out, total, eps, x.shape, scale)
    return out.view(x.shape), total.view(x.shape)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, E], elements of a row adjacent; a copy only where strides leave no other way."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _launch(
    rows: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
    shape: torch.Size,
    scale: torch.Tensor | None = None,
) -> None:
    num_rows, size = rows.shape
    assert weight.is_contiguous() and weight.shape == shape[len(shape) - weight.ndim :]
    block = triton.next_power_of_2(size)
    if num_rows:
        _rms_norm_kernel[(num_rows,)](
            rows,
            residual,
            weight,
            scale,
            out,
            total,
            eps,
            rows.stride(0),
            0 if residual is None else residual.stride(0),
            SIZE=size,
            BLOCK=block,
            WEIGHT_ROWS=weight.numel() // size,
            HAS_RESIDUAL=residual is not None,
            HAS_SCALE=scale is not None,
            num_warps=min(max(block // 512, 1), 16),
        )


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    scale_ptr,
    out_ptr,
    total_ptr,
    eps,
    stride,
    residual_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WEIGHT_ROWS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    index_E = tl.arange(0, BLOCK)
    is_real_E = index_E < SIZE
    raw_E = tl.load(x_ptr + row * stride + index_E, mask=is_real_E, other=0.0)
    x_E = raw_E.to(tl.float32)
    if HAS_RESIDUAL:
        residual_E = tl.load(residual_ptr + row * residual_stride + index_E, mask=is_real_E, other=0.0)
        raw_E = (x_E + residual_E.to(tl.float32)).to(raw_E.dtype)  # what is normalized is the sum as it is returned
        if HAS_SCALE:
            raw_E = (raw_E.to(tl.float32) * tl.load(scale_ptr).to(tl.float32)).to(raw_E.dtype)
        tl.store(total_ptr + row * SIZE + index_E, raw_E, mask=is_real_E)
        x_E = raw_E.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x_E * x_E, 0) / SIZE + eps)
    weight_E = tl.load(weight_ptr + row % WEIGHT_ROWS * SIZE + index_E, mask=is_real_E, other=0.0)
    out_E = (x_E * inverse).to(weight_E.dtype).to(tl.float32) * weight_E.to(tl.float32)
    tl.store(out_ptr + row * SIZE + index_E, out_E, mask=is_real_E)
