"""Products with weights of four bits: unpacked by the kernel that multiplies, unpacked before, and beside bfloat16's.

Predicted for an H100, not measured. A multiprocessor issues 3.3 to 4.2 instructions for a whole number and 4.1 to 4.6
for an E2M1 in tiles of up to 64 rows (counted in what Triton 3.6 compiles), that is 6.4e12 numbers a second or more,
where memory gives 6.3e12 of them and 1.7e12 of bfloat16: a matrix or experts take 0.27 to 0.3 of bfloat16's time, 0.4
where only 65% of that rate is reached; unpacking before takes at least 2.25 times bfloat16's. At 512 rows numbers are
unpacked four times, in less than unpacking before takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from bulkrun import ops
from bulkrun.launch.bench.op_costs import experts_cost
from bulkrun.ops.experts.four_bit_experts import four_bit_experts
from bulkrun.ops.matmul.four_bit_linear import four_bit_linear
from bulkrun.ops.matmul.four_bit_weight import E2M1, WHOLE_NUMBERS, FourBitWeight, in_bits, unpack
from tests.benchmarks.gpu_case import BYTES, Case, Sizes

_CODE_BYTES = 0.5
_ROWS = (16, 64, 256, 512, 1024)


def four_bit_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """The widest projection of the model, as AWQ and GPTQ store it, and experts in MXFP4."""
    inner, outer = sizes.hidden_size, 2 * sizes.intermediate_size
    weight = random_weight((outer, inner), 64, device)
    plain = unpack(weight, torch.bfloat16)
    for rows in _ROWS if max(sizes.rows) > max(_ROWS) else sizes.rows:
        x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
        num_bytes, flops = BYTES * rows * (inner + outer) + _CODE_BYTES * inner * outer, 2.0 * rows * inner * outer
        product = partial(ops.linear, x, plain, None)
        yield Case(f"four_bits rows={rows}", partial(ops.four_bit_linear, x, weight, None), num_bytes, flops, product)
        before = partial(four_bit_linear, x, weight, None)
        yield Case(f"four_bits unpacked before rows={rows}", before, num_bytes, flops, product)
    yield from _expert_cases(sizes, device)


def _expert_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    num_experts, top_k, width = sizes.experts
    both = [random_weight((num_experts, *shape), 32, device) for shape in ((2 * width, width), (width, width))]
    plain = [unpack(weight, torch.bfloat16) for weight in both]
    for rows in dict.fromkeys((min(sizes.rows), sizes.decode_seqs, sizes.num_tokens)):
        x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
        routed = ops.route_top_k(torch.randn(rows, num_experts, device=device), top_k, renormalize=True)
        cost = experts_cost(
            rows, num_experts=num_experts, experts_per_tok=top_k, expert_weights=3 * width**2, itemsize=_CODE_BYTES
        )
        num_bytes, rival = cost.num_bytes + 2 * BYTES * x.numel(), partial(ops.fused_experts, x, *plain, *routed)
        yield Case(
            f"mxfp4_experts T={rows}", partial(ops.fused_experts, x, *both, *routed), num_bytes, cost.flops, rival
        )
        before = partial(four_bit_experts, x, *both, *routed, None, None)
        yield Case(f"mxfp4_experts unpacked before T={rows}", before, num_bytes, cost.flops, rival)


def random_weight(shape: tuple[int, ...], group_size: int, device: str) -> FourBitWeight:
    """Whole numbers with zero points, or of experts E2M1."""
    *outputs, size = shape
    codes = torch.randint(256, (*outputs, size // 2), dtype=torch.uint8, device=device)
    scale = torch.full((*outputs, size // group_size), 2.0**-8, device=device)
    if len(outputs) > 1:
        return in_bits(FourBitWeight(codes, scale.bfloat16(), None, torch.tensor(E2M1, device=device)))
    zero = torch.randint(16, scale.shape, dtype=torch.uint8, device=device)
    return in_bits(FourBitWeight(codes, scale, zero, torch.tensor(WHOLE_NUMBERS, device=device)))
