"""Norms, rotary embedding, gated activation and linear beside transformers' and torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from bulkrun import ops
from bulkrun.ops.attention.rotary import apply_rotary
from bulkrun.ops.matmul.linear import can_pack_bfloat16, is_packed

pytestmark = pytest.mark.usefixtures("cpu_ops")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 3, 33) * 5).to(dtype)[:, 1:]
    reference = LlamaRMSNorm(33, eps=1e-3).to(dtype)
    reference.weight.data.uniform_(0.5, 1.5)
    torch.testing.assert_close(ops.rms_norm(x, reference.weight.data, 1e-3), reference(x))


def test_rms_norm_takes_a_weight_per_head() -> None:
    x, weight = torch.randn(5, 4, 16), torch.rand(4, 16)
    per_head = torch.stack([ops.rms_norm(x[:, head], weight[head], 1e-6) for head in range(4)], dim=1)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6), per_head)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_with_a_float32_weight_rounds_once_as_gemma_does(dtype: torch.dtype) -> None:
    x = (torch.randn(7, 33) * 5).to(dtype)
    reference = Gemma2RMSNorm(33, eps=1e-3)
    reference.weight.data.uniform_(-0.5, 4.5)
    normed = ops.rms_norm(x, 1.0 + reference.weight.data, 1e-3)
    assert normed.dtype == dtype
    torch.testing.assert_close(normed, reference(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(2, 9, 40).to(dtype)[0], torch.randn(9, 40).to(dtype), torch.rand(40).to(dtype)
    before = residual.clone()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(residual, before)
    reference = LlamaRMSNorm(40).to(dtype)
    reference.weight.data.copy_(weight)
    torch.testing.assert_close(normed, reference(x + residual))
    scale = torch.tensor([0.37]).to(dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6, scale)
    assert torch.equal(total, (x + residual) * scale)
    torch.testing.assert_close(normed, reference(total))


@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_rotary_equals_transformers(head_dim: int) -> None:
    positions, inv_freq = torch.tensor([0, 1, 17, 5000]), 1.0 / 10_000 ** (torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.cat([positions[:, None].float() * inv_freq] * 2, dim=-1)[None]
    q, k = torch.randn(1, 6, 4, head_dim), torch.randn(1, 2, 4, head_dim)
    expected_q, expected_k = apply_rotary_pos_emb(q, k, angles.cos() * 1.3, angles.sin() * 1.3)
    cos, sin = ops.rotary_cos_sin(positions, inv_freq, 1.3, torch.float32)
    ours = apply_rotary(torch.cat((q[0], k[0])).transpose(0, 1), cos, sin)
    torch.testing.assert_close(ours[:, :6], expected_q[0].transpose(0, 1))
    torch.testing.assert_close(ours[:, 6:], expected_k[0].transpose(0, 1))


def test_partial_rotary_turns_the_first_dimensions_only() -> None:
    cos, sin = ops.rotary_cos_sin(torch.arange(5), torch.rand(6), 1.0, torch.float32)
    x = torch.randn(5, 3, 20)
    ours = apply_rotary(x, cos, sin)
    assert torch.equal(ours[..., 12:], x[..., 12:])
    torch.testing.assert_close(ours[..., :12], apply_rotary(x[..., :12].contiguous(), cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_mul_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 23).to(dtype)
    torch.testing.assert_close(ops.gelu_mul(torch.cat((gate, up), dim=-1)), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul_gates_the_second_half_with_the_first(dtype: torch.dtype) -> None:
    gate, up = torch.randn(2, 5, 23).to(dtype)
    torch.testing.assert_close(ops.silu_mul(torch.cat((gate, up), dim=-1)), F.silu(gate) * up)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 64])
@pytest.mark.parametrize("size", [(95, 48), (96, 64)], ids=str)
def test_packed_linear_equals_plain_linear(rows: int, size: tuple[int, int], bias: bool) -> None:
    x, weight = torch.randn(rows, size[1]).bfloat16(), torch.randn(size).bfloat16()
    bias_O = torch.randn(size[0]).bfloat16() if bias else None
    packed = ops.pack_linear_weight(weight)
    assert is_packed(packed) == can_pack_bfloat16()
    exact = F.linear(x.double(), weight.double(), None if bias_O is None else bias_O.double())
    torch.testing.assert_close(ops.linear(x, packed, bias_O).double(), exact, atol=1e-1, rtol=1e-2)


def test_float32_weights_are_left_plain() -> None:
    weight = torch.randn(5, 4)
    assert ops.pack_linear_weight(weight) is weight
    torch.testing.assert_close(ops.linear(torch.ones(1, 4), weight, None), weight.sum(1)[None])


def test_numbers_that_lie_apart_and_dtypes_beside_each_other() -> None:
    wide, weight = torch.randn(5, 92), torch.rand(46)
    apart = wide[:, ::2]
    plain = apart.contiguous()
    for op in (ops.silu_mul, ops.gelu_mul):
        torch.testing.assert_close(op(apart), op(plain))
    torch.testing.assert_close(ops.cut_gates_(wide.clone()[:, ::2], 0.5), ops.cut_gates_(plain.clone(), 0.5))
    for x, residual in ((apart, plain), (plain, apart), (plain.bfloat16(), plain)):
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
        assert torch.equal(total, x + residual)
        torch.testing.assert_close(normed, ops.rms_norm(total, weight, 1e-6))
