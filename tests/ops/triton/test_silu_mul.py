"""Activations in Triton beside torch's own, and beside those of the models' own code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import XIELUActivation

from bulkrun import ops
from bulkrun.ops.experts.clamped_swiglu import ClampedSwiglu
from bulkrun.ops.experts.clamped_swiglu import clamped_swiglu as reference
from bulkrun.ops.triton.clamped_swiglu import clamped_swiglu
from bulkrun.ops.triton.gelu_mul import gelu_mul
from bulkrun.ops.triton.silu_mul import silu_mul
from bulkrun.ops.triton.xielu import xielu
from bulkrun.ops.xielu import xielu as reference_xielu

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 1025, pytest.param(2880, marks=pytest.mark.gpu)])
def test_clamped_swiglu_is_that_of_gpt_oss(device: str, dtype: torch.dtype, size: int) -> None:
    gate, up = (torch.randn(2, 3, size) * 5).to(device, dtype)
    up[0, 0] = math.nan
    exact_gate, exact_up = gate.double().clamp(max=7.0), up.double().clamp(-7.0, 7.0)
    exact = (exact_up + 1) * exact_gate * torch.sigmoid(exact_gate * 1.702)
    error = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for op in (clamped_swiglu, reference):
        ours = op(torch.cat((gate, up), dim=-1), ClampedSwiglu(1.702, 7.0))
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=error, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(0, 5), (3, 1), (3, 1025), pytest.param((64, 21504), marks=pytest.mark.gpu)])
def test_xielu_is_that_of_apertus(device: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """In float64 it is transformers' own, which rounds each of its steps."""
    x = (torch.randn(shape) * 3).to(device, dtype)
    alphas = torch.tensor([0.7, -1.3], device=device)
    if x.numel():
        x[0, 0], x[-1, 0] = 0.0, -1e-7
    theirs = XIELUActivation(dtype=torch.float64).to(device)
    theirs.alpha_p.data, theirs.alpha_n.data = alphas.double().split(1)
    exact = theirs(x.double())
    error = 1e-5 if dtype == torch.float32 else torch.finfo(dtype).eps
    for op in (xielu, reference_xielu, ops.xielu):  # the last is C++ on a CPU
        ours = op(x, alphas)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, atol=1e-6, rtol=error)


def test_strided_rows_and_no_rows(device: str) -> None:
    gate_up = torch.randn(2, 4, 12, device=device)[:, ::2]
    torch.testing.assert_close(silu_mul(gate_up), F.silu(gate_up[..., :6]) * gate_up[..., 6:])
    assert silu_mul(torch.empty(0, 12, device=device)).shape == (0, 6)
