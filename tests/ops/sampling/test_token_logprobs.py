"""Log-probabilities of tokens beside those of a float64 softmax and a full sort, reference and twins."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.cpu.token_logprobs import token_logprobs as compiled
from bulkrun.ops.sampling.token_logprobs import token_logprobs
from bulkrun.ops.triton.token_logprobs import token_logprobs as in_triton

pytestmark = pytest.mark.filterwarnings(  # the interpreter's numpy says so of rows that hold no numbers
    "ignore:invalid value encountered", "ignore:divide by zero encountered", "ignore:All-NaN slice encountered"
)
needs_compiled = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
TWINS = [pytest.param(in_triton, id="triton"), pytest.param(compiled, marks=needs_compiled, id="compiled")]
OPS = pytest.mark.parametrize("op", [pytest.param(token_logprobs, id="reference"), *TWINS])


def device_of(op: object) -> str:
    return "cuda" if op is in_triton and torch.cuda.is_available() else "cpu"


def random_logits(rows: int, vocab_size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    logits_SV = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 6
    return logits_SV.to(dtype).to(device)


@OPS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 17, 301, 4096, 4099, 20_001])
@pytest.mark.parametrize("k", [0, 1, 20])
@pytest.mark.pairs("dtype", "vocab_size", "k")
def test_they_are_the_log_softmax_of_the_logits(op: Any, dtype: torch.dtype, vocab_size: int, k: int) -> None:
    k = min(k, vocab_size)
    logits_SV = random_logits(5, vocab_size, dtype, device_of(op))
    token_S = torch.tensor([0, vocab_size - 1, vocab_size // 2, vocab_size // 3, 0], device=logits_SV.device)
    chosen_S, values_Sk, ids_Sk = op(logits_SV, token_S, k)
    expected_SV = logits_SV.double().log_softmax(-1)
    assert (chosen_S.dtype, values_Sk.dtype, ids_Sk.dtype) == (torch.float32, torch.float32, torch.int64)
    torch.testing.assert_close(chosen_S.double(), expected_SV.gather(1, token_S[:, None])[:, 0], atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(values_Sk.double(), expected_SV.topk(k).values, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(expected_SV.gather(1, ids_Sk), expected_SV.topk(k).values, atol=0, rtol=0)
    assert all(len(set(ids)) == k for ids in ids_Sk.tolist())


@OPS
def test_of_equals_the_first_token_stands_first(op: Any) -> None:
    logits_SV = torch.zeros(2, 9000, device=device_of(op))
    logits_SV[0, 8000], logits_SV[1, ::3] = 2.0, 1.0
    _, _, ids_Sk = op(logits_SV, torch.zeros(2, dtype=torch.int64, device=logits_SV.device), 5)
    assert ids_Sk.tolist() == [[8000, 0, 1, 2, 3], [0, 3, 6, 9, 12]]


@OPS
def test_the_likeliest_ones_do_not_depend_on_how_many_a_neighbour_wants(op: Any) -> None:
    logits_SV = random_logits(50, 4096, torch.bfloat16, device_of(op))  # in bf16 many are equal
    token_S = torch.zeros(50, dtype=torch.int64, device=logits_SV.device)
    assert torch.equal(op(logits_SV, token_S, 2)[2], op(logits_SV, token_S, 20)[2][:, :2])


@OPS
def test_tokens_that_cannot_come_have_no_probability(op: Any) -> None:
    logits_SV = torch.full((1, 5000), -math.inf, device=device_of(op))
    logits_SV[0, 4500], logits_SV[0, 7] = 1.0, 1.0 + math.log(3)
    chosen_S, values_Sk, ids_Sk = op(logits_SV, torch.tensor([9], device=logits_SV.device), 4)
    assert chosen_S.tolist() == [-math.inf]
    assert values_Sk[0].tolist() == pytest.approx([math.log(0.75), math.log(0.25), -math.inf, -math.inf])
    assert ids_Sk[0, :2].tolist() == [7, 4500]
    assert ids_Sk.max() < 5000 and len(set(ids_Sk[0].tolist())) == 4


@OPS
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_row_without_numbers_spoils_no_other_and_names_tokens_that_exist(op: Any, wrong: float) -> None:
    logits_SV = random_logits(3, 4500, torch.float32, device_of(op))
    token_S = torch.tensor([4, 5, 6], device=logits_SV.device)
    expected = op(logits_SV, token_S, 3)
    logits_SV[1] = wrong
    found = op(logits_SV, token_S, 3)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[::2], other[::2])
    assert found[2].min() >= 0 and found[2].max() < 4500


@OPS
def test_a_row_s_numbers_do_not_depend_on_the_rows_beside_it(op: Any) -> None:
    logits_SV = random_logits(40, 6000, torch.bfloat16, device_of(op))
    token_S = torch.arange(40, device=logits_SV.device)
    together = op(logits_SV, token_S, 8)
    alone = op(logits_SV[17:18], token_S[17:18], 8)
    for one, other in zip(together, alone, strict=True):
        assert torch.equal(one[17:18], other)


@needs_compiled
def test_rows_and_tokens_may_lie_apart() -> None:
    logits_SV, token_S = random_logits(3, 90, torch.float32, "cpu"), torch.tensor([4, 0, 5, 0, 6, 0])[::2]
    expected = token_logprobs(logits_SV, token_S, 5)
    for given in (logits_SV, logits_SV.repeat_interleave(2, 1)[:, ::2]):
        for one, other in zip(compiled(given, token_S, 5), expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-6)
