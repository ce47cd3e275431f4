"""Gates of which few are above zero, in Triton: one row per program, whose sums never depend on the rows beside it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def cut_gates_(gate_TI: torch.Tensor, num_deviations: float) -> torch.Tensor:
    """As the reference, in one pass."""
    num_rows, size = gate_TI.shape
    assert gate_TI.stride(1) == 1
    block = triton.next_power_of_2(size)
    if num_rows:
        _cut_gates_kernel[(num_rows,)](
            gate_TI, num_deviations, gate_TI.stride(0), SIZE=size, BLOCK=block, num_warps=min(max(block // 512, 1), 16)
        )
    return gate_TI


@triton.jit
def _cut_gates_kernel(gate_ptr, num_deviations, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    index_I = tl.arange(0, BLOCK)
    is_real_I = index_I < SIZE
    row_ptr = gate_ptr + tl.program_id(0).to(tl.int64) * stride
    gate_I = tl.load(row_ptr + index_I, mask=is_real_I, other=0.0).to(tl.float32)
    centered_I = tl.where(is_real_I, gate_I - tl.sum(gate_I, 0) / SIZE, 0.0)
    deviation = tl.sqrt(tl.sum(centered_I * centered_I, 0) / SIZE)
    cut_I = tl.maximum(centered_I - num_deviations * deviation, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(row_ptr + index_I, cut_I, mask=is_real_I)
