"""What torch asks of the operands of a GPU's own products, by its own checks: on tensors without numbers, in bf16.

Nothing else here calls these products: no CPU has them, and tests of what calls them put references in their place.
"""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from bulkrun.ops.experts.grouped_experts import grouped_experts
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.matmul.fp8_linear import quantize_rows
from bulkrun.ops.triton import fp8_linear


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 17])
def test_the_scaled_product_takes_rows_with_scales(
    num_tokens: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_linear, "quantize_rows", quantize_rows)
    with FakeTensorMode(), torch.device("cuda"):
        x, bias = torch.empty(num_tokens, 64, dtype=torch.bfloat16), torch.empty(48, dtype=torch.bfloat16)
        weight, scale = torch.empty(48, 64, dtype=FP8), torch.empty(48, 1)
        out = fp8_linear.fp8_linear(x, weight, scale, bias if has_bias else None)
        assert (out.shape, out.dtype) == ((num_tokens, 48), torch.bfloat16)
        with pytest.raises(RuntimeError, match="scaling"):
            torch._scaled_mm(x.to(FP8), weight.t(), scale.t(), scale.t(), out_dtype=torch.bfloat16)


@pytest.mark.parametrize("num_tokens", [1, 7])
def test_the_grouped_product_takes_pairs_and_experts_in_bfloat16(num_tokens: int) -> None:
    def experts(size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        with torch.device("meta"):
            x_TE, gate_up, down = (
                torch.empty(*s, dtype=dtype) for s in ((num_tokens, 48), (5, 2 * size, 48), (5, 48, size))
            )
            weights, ids = torch.empty(num_tokens, 2), torch.empty(num_tokens, 2, dtype=torch.int64)
        return grouped_experts(x_TE, gate_up, down, weights, ids, None, None)

    assert experts(24).shape == (num_tokens, 48)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        experts(20)
