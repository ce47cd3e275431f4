"""What the quality check counts, on positions written by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bulkrun.request import TokenLogprob
from tests.benchmarks.fp8_quality import Text, compare, difference, perplexity, summary
from tests.models.tiny_models import save_tiny_model

EXACT = TokenLogprob(7, -2.0, ((1, -0.5), (7, -2.0), (3, -3.0)))


def test_the_same_choice_agrees_whatever_the_gap() -> None:
    ours = TokenLogprob(7, -2.5, ((1, -0.4), (7, -2.5), (9, -4.0)))
    one = difference(ours, EXACT)
    assert (one.agrees, one.regret) == (True, 0.0)
    assert one.gap == pytest.approx(0.5)


def test_another_choice_is_regretted_by_what_float32_thinks_of_it() -> None:
    one = difference(TokenLogprob(7, -0.3, ((7, -0.3), (1, -0.9))), EXACT)
    assert not one.agrees
    assert one.regret == pytest.approx(1.5)
    assert one.gap == pytest.approx(1.7)


def test_a_choice_that_float32_does_not_know_is_far_off_and_spoils_no_mean() -> None:
    unknown = TokenLogprob(7, -9.0, ((50, -0.1),))
    facts = summary([unknown, EXACT], [EXACT, EXACT])
    expected = {"agreement": 0.5, "worst_regret": 0.0, "far_off": 1, "worst_gap": 0.0, "mean_gap": 0.0}
    assert facts == expected


@pytest.mark.parametrize(("variant", "refused"), [("mixtral", False), ("gpt2", True)])
def test_what_a_model_refuses_is_said_and_the_rest_measured(variant: str, refused: bool, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, variant)
    rows = compare(path, [Text([5, 9, 30, 2, 77], 1)], "cpu")["precisions"]
    for name in ("weights fp8", "weights int8", "both fp8"):
        assert ("GPT2LMHeadModel" in rows[name]["refused"]) if refused else rows[name]["far_off"] == 0
    assert rows["kv fp8"]["far_off"] == 0


def test_perplexity_is_of_the_texts_own_tokens() -> None:
    assert perplexity([EXACT, TokenLogprob(1, -1.0)]) == pytest.approx(math.exp(1.5), abs=1e-4)
