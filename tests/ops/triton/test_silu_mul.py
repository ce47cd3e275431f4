"""The gated activations in Triton beside torch's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from bulkrun.ops.triton.gelu_mul import gelu_mul
from bulkrun.ops.triton.silu_mul import silu_mul

Op = Callable[[torch.Tensor], torch.Tensor]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ACTIVATIONS = [(silu_mul, F.silu), (gelu_mul, partial(F.gelu, approximate="tanh"))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1025, pytest.param(14336, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("op", "activation"), ACTIVATIONS, ids=["silu", "gelu"])
def test_gates_the_second_half_with_the_first(
    device: str, op: Op, activation: Op, dtype: torch.dtype, size: int
) -> None:
    gate, up = torch.randn(2, 3, size).to(device, dtype) * 3
    # torch rounds twice as we do; where a value lies between two, either may be taken each time
    error = (
        {"atol": 1e-4, "rtol": 2 * torch.finfo(dtype).eps} if dtype != torch.float32 else {"atol": 1e-5, "rtol": 1e-5}
    )
    torch.testing.assert_close(op(torch.cat((gate, up), dim=-1)), activation(gate) * up, **error)


def test_strided_rows_and_no_rows(device: str) -> None:
    gate_up = torch.randn(2, 4, 12, device=device)[:, ::2]
    torch.testing.assert_close(silu_mul(gate_up), F.silu(gate_up[..., :6]) * gate_up[..., 6:])
    assert silu_mul(torch.empty(0, 12, device=device)).shape == (0, 6)
