"""Rows so far apart that their addresses take more than 32 bits, in memory that nobody touches but there.

A product of two int32 wraps in the interpreter as on a GPU, and what it points to then is nobody's: the sanitizer says.
(Not of the kernels that go from token to token: they count in 64 bits, and the interpreter makes any loop's number 32.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from bulkrun.ops.attention.packed_attention import TextLens
from bulkrun.ops.triton.causal_conv import causal_conv
from bulkrun.ops.triton.cut_gates import cut_gates_
from bulkrun.ops.triton.draw_tokens import draw_tokens
from bulkrun.ops.triton.fp8_linear import quantize_rows
from bulkrun.ops.triton.gated_rms_norm import gated_rms_norm
from bulkrun.ops.triton.invariant_linear import invariant_linear
from bulkrun.ops.triton.layer_norm import add_layer_norm
from bulkrun.ops.triton.norm_rotary_store import norm_rotary_store
from bulkrun.ops.triton.packed_attention import packed_attention
from bulkrun.ops.triton.rms_norm import add_rms_norm
from bulkrun.ops.triton.silu_mul import silu_mul
from bulkrun.ops.triton.token_logprobs import token_logprobs
from tests.ops.linear_attention.steps import Part, make_meta
from tests.ops.triton.attention_cases import make_case
from tests.ops.triton.far_memory import far_memory
from tests.ops.triton.test_paged_attention import attend

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="memory of a GPU is not there for nothing"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # hashes wrap, and where a test fails addresses
]
APART = 2**30  # numbers, of which the third row has twice as many before it
ROWS, SIZE = 3, 32
META = make_meta([Part(1, 0, 2), Part(4, 2, 1)])


@cache
def memory() -> torch.Tensor:
    """Before the last 4096 numbers the rows have their places."""
    return far_memory((2 * APART + 8192,), torch.float16)


def ones(*shape: int) -> torch.Tensor:
    return torch.linspace(0.5, 1.5, torch.Size(shape).numel()).view(shape)


def drawn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    seeds = torch.arange(ROWS)
    return draw_tokens(x, torch.full((ROWS,), 0.8), seeds, seeds, top_k_S=torch.full((ROWS,), 9))


def stored(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, and keys in the last slots of a large cache."""
    k_cache = memory().view(-1, 4, 1, 8)
    slots = k_cache.shape[0] * 4 - 1 - torch.arange(ROWS)
    q_THD = norm_rotary_store(x.unflatten(1, (4, 8)), None, 1e-6, None, None, k_cache, None, slots)
    return q_THD, k_cache[-1].clone()


def attended(x: torch.Tensor) -> torch.Tensor:
    q, k, v = x[:, :24].unflatten(1, (3, 8)).split(1, 1)
    return packed_attention(q, k, v, TextLens.of([3]), scale=0.3)


def prompted(x: torch.Tensor) -> torch.Tensor:
    case = make_case([ROWS], [5], (2, 1, 16), dtype=torch.float16, device="cpu")
    return attend(replace(case, q_THD=x.unflatten(1, (2, 16))))


OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_rms_norm": lambda x: add_rms_norm(x, x, ones(SIZE).half(), 1e-5),
    "add_layer_norm": lambda x: add_layer_norm(x, x, *ones(2, SIZE).half(), 1e-5),
    "silu_mul": silu_mul,
    "cut_gates_": lambda x: cut_gates_(x, 0.3),
    "quantize_rows": quantize_rows,
    "token_logprobs": lambda x: token_logprobs(x, torch.arange(ROWS), 2),
    "draw_tokens": drawn,
    "invariant_linear": lambda x: invariant_linear(x, [ones(16, SIZE).half()], None, None),
    "norm_rotary_store": stored,
    "packed_attention": attended,
    "paged_attention": prompted,
    "gated_rms_norm": lambda x: gated_rms_norm(ones(ROWS, 2, 16), x.unflatten(1, (2, 16)), ones(16), 1e-5),
    "causal_conv": lambda x: causal_conv(
        x, ones(4, SIZE).half(), None, torch.zeros(7, 3, SIZE).half(), META, silu=True
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_rows_may_lie_further_apart_than_32_bits_count(name: str) -> None:
    far = memory().as_strided((ROWS, SIZE), (APART, 1)).copy_(torch.randn(ROWS, SIZE))
    near = far.clone(memory_format=torch.contiguous_format)
    found, expected = OPS[name](far), OPS[name](near)
    for one, other in zip(*((x,) if isinstance(x, torch.Tensor) else x for x in (found, expected)), strict=True):
        assert torch.equal(one.float(), other.float())
