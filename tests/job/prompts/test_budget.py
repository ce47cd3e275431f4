"""`run.max_tokens_per_row`: no row takes more than its budget, and none gets less than it could."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.prompts.budget import RowBudget
from bulkrun.job.prompts.fit import PromptFitter
from bulkrun.job.prompts.overrides import RowSampling
from bulkrun.request import RowError


@given(
    bound=st.integers(2, 200),
    outputs=st.integers(1, 8),
    prompt=st.integers(1, 220),
    max_tokens=st.integers(1, 300),
    min_tokens=st.integers(0, 3),
)
def test_a_row_stays_within_its_budget_or_is_too_long(
    bound: int, outputs: int, prompt: int, max_tokens: int, min_tokens: int
) -> None:
    limited = RowBudget(bound, outputs, min_tokens).limit(prompt, RowSampling(None, max_tokens, True))
    if isinstance(limited, RowError):
        assert limited.code == "too_long" and prompt + outputs > bound
        return
    assert prompt + outputs * limited.max_tokens <= bound or limited.max_tokens == max_tokens
    assert prompt + outputs * limited.max_tokens <= bound
    if limited.max_tokens < max_tokens:
        assert prompt + outputs * (limited.max_tokens + 1) > bound, "it could have had one token more"
    params = SamplingSpec(max_tokens=max(max_tokens, 1)).to_params(json.loads(limited.overrides or "{}"))
    assert params.max_tokens == limited.max_tokens and params.min_tokens <= params.max_tokens


def test_the_cut_is_one_of_the_rows_own_values_and_the_others_stay() -> None:
    own = RowSampling('{"seed":3,"temperature":0.5}', 100, False)
    limited = RowBudget(50, 2).limit(10, own)
    assert limited == RowSampling('{"max_tokens":20,"seed":3,"temperature":0.5}', 20, False)
    assert RowBudget(None, 2).limit(10, own) is own
    assert RowBudget(210, 2).limit(10, own) is own


def test_min_tokens_never_exceed_a_cut_max_tokens() -> None:
    limited = RowBudget(20, 1, min_tokens=15).limit(10, RowSampling(None, 100, True))
    assert isinstance(limited, RowSampling) and json.loads(limited.overrides or "") == {
        "max_tokens": 10,
        "min_tokens": 10,
    }


@pytest.mark.parametrize(("outputs", "length"), [(1, 25), (4, 25), (40, 10)])
def test_prompts_that_may_be_cut_are_cut_to_what_the_budget_leaves(outputs: int, length: int) -> None:
    fitter = PromptFitter(1000, "truncate_left", RowBudget(50, outputs))
    assert fitter.fit(list(range(100)), 200) == list(range(100 - length, 100))
    assert fitter.fit([1, 2, 3], 200) == [1, 2, 3]


def test_a_budget_that_leaves_nothing_to_cut_to_refuses_the_row() -> None:
    fitter = PromptFitter(1000, "truncate_left", RowBudget(4, 4))
    token_ids = fitter.fit([1, 2, 3, 4, 5], 10)
    assert isinstance(token_ids, list)
    assert isinstance(fitter.budget.limit(len(token_ids), RowSampling(None, 10, True)), RowError)
