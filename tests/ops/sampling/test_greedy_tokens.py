"""The likeliest tokens beside a search in Python, in every dtype, reference and compiled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops.cpu.greedy_tokens import greedy_tokens as compiled
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.sampling.greedy_tokens import greedy_tokens

needs_compiled = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
OPS = pytest.mark.parametrize(
    "op", [greedy_tokens, pytest.param(compiled, marks=needs_compiled)], ids=["reference", "compiled"]
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
INF, NAN = math.inf, math.nan


def check(op: object, logits_SV: torch.Tensor) -> None:
    token_S, is_valid_S = op(logits_SV)  # type: ignore[operator]
    assert token_S.dtype == torch.int64 and is_valid_S.dtype == torch.bool
    for row, token, is_valid in zip(logits_SV.tolist(), token_S.tolist(), is_valid_S.tolist(), strict=True):
        has_maximum = not any(math.isnan(x) for x in row) and math.isfinite(max(row))
        assert is_valid == has_maximum
        assert 0 <= token < len(row)
        if is_valid:
            assert token == row.index(max(row))


@OPS
@DTYPES
@pytest.mark.parametrize("vocab_size", [1, 15, 16, 17, 63, 64, 65, 129, 1000, 8192])
def test_rows_of_any_length(op: object, dtype: torch.dtype, vocab_size: int) -> None:
    check(op, torch.randn(7, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype))


@OPS
@DTYPES
def test_the_first_of_equals_wherever_they_are(op: object, dtype: torch.dtype) -> None:
    rows = torch.full((100, 100), -3.0, dtype=dtype)
    for place in range(100):
        rows[place, place] = rows[place, (7 * place) % 100] = 2.0
    check(op, rows)
    check(op, torch.zeros(2, 40, dtype=dtype))
    check(op, torch.tensor([[-1.0, -0.0, 0.0, -0.0]], dtype=dtype))


@OPS
@DTYPES
@pytest.mark.parametrize("number", [NAN, INF, -INF])
def test_what_is_no_number_is_flagged_wherever_it_is(op: object, dtype: torch.dtype, number: float) -> None:
    rows = torch.randn(70, 70, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows.fill_diagonal_(number)
    check(op, rows)
    check(op, torch.full((2, 33), number, dtype=dtype))


@OPS
@settings(max_examples=60)
@given(
    rows=st.integers(1, 40).flatmap(
        lambda size: st.lists(
            st.lists(st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.5, INF, -INF, NAN]), min_size=size, max_size=size),
            min_size=1, max_size=4,
        )
    )
)  # fmt: skip
def test_any_rows(op: object, rows: list[list[float]]) -> None:
    check(op, torch.tensor(rows))
    check(op, torch.tensor(rows, dtype=torch.bfloat16))


@needs_compiled
def test_rows_apart_and_many_rows() -> None:
    """A slice goes to the reference; many rows are divided among threads."""
    wide = torch.randn(300, 400, generator=torch.Generator().manual_seed(2))
    check(compiled, wide[:, :390])
    check(compiled, wide)


@needs_compiled
def test_no_rows() -> None:
    token_S, is_valid_S = compiled(torch.empty(0, 5))
    assert token_S.shape == is_valid_S.shape == (0,)
