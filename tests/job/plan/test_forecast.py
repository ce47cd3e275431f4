"""Forecasts of jobs whose true length is known, because they are made up here."""

from __future__ import annotations

import numpy as np
import pytest

from bulkrun.job.plan.forecast import OutputLength, Slice, forecast, mean_length


def slices(rng: np.random.Generator, prompt_s: float, output_s: float, noise: float = 0.05) -> list[Slice]:
    """Those of a probe: at first more prompts, then more outputs."""
    work = [(int(rng.integers(500, 3000) * (3 if i < 4 else 1)), int(rng.integers(200, 900))) for i in range(20)]
    return [Slice((prompt_s * p + output_s * o) * rng.normal(1, noise), p, o) for p, o in work]


def outputs(rng: np.random.Generator, mean: float, limit: int, number: int = 300) -> tuple[list[OutputLength], float]:
    """Outputs that the end of a probe cut at any place, and what their mean is in the end."""
    whole = np.minimum(rng.geometric(1 / mean, 100_000), limit)
    seen, until = rng.choice(whole, number), rng.integers(5, 3 * mean, number)
    cut = [
        OutputLength(int(min(t, u)), bool(t <= u), limit) for t, u in zip(seen.tolist(), until.tolist(), strict=True)
    ]
    return cut, float(whole.mean())


@pytest.mark.parametrize(("prompt_s", "output_s"), [(2e-4, 1.5e-3), (1e-5, 1e-3), (5e-4, 5e-4)])
def test_the_truth_is_in_the_range_and_near_what_is_likely(prompt_s: float, output_s: float) -> None:
    held, off = 0, []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        lengths, mean = outputs(rng, mean=80, limit=600)
        found = forecast(slices(rng, prompt_s, output_s), lengths, prompt_tokens=1_000_000, generations=5000)
        truth = prompt_s * 1_000_000 + output_s * 5000 * mean
        held += found.seconds.low <= truth <= found.seconds.high
        off.append(found.seconds.likely / truth)
        assert found.output_tokens.low <= found.output_tokens.likely <= found.output_tokens.high
    assert held >= 54 and np.median(off) == pytest.approx(1, abs=0.1)


def test_outputs_that_all_ended_have_their_own_mean() -> None:
    found = mean_length([OutputLength(tokens, True, 100) for tokens in (10, 20, 30, 40)])
    assert found.likely == 25 and found.low < 25 < found.high


def test_what_has_not_ended_is_at_least_as_long_as_it_is_and_at_most_its_limit() -> None:
    found = mean_length([OutputLength(50, False, 200)] * 10)
    assert (found.low, found.high) == (50, 200) and 50 < found.likely <= 200
    half = mean_length([OutputLength(10, True, 100), OutputLength(90, False, 100)] * 50)
    assert half.likely == pytest.approx(0.5 * 10 + 0.5 * 100)


def test_texts_of_which_nothing_is_generated_take_what_their_tokens_take() -> None:
    found = forecast([Slice(0.5, 1000, 0), Slice(1.0, 2000, 0)], [], prompt_tokens=10_000, generations=100)
    assert found.output_tokens == (0, 0, 0) and found.seconds.likely == pytest.approx(5)
    assert found.seconds.low <= 4.5 and found.seconds.high >= 5.5, "no probe is that exact"


@pytest.mark.parametrize("number", [1, 2, 20])
def test_work_that_never_changes_its_mixture_is_one_kind_of_work(number: int) -> None:
    outputs = [OutputLength(10, True, 10)]
    found = forecast([Slice(1.0, 300, 100)] * number, outputs, prompt_tokens=3000, generations=100)
    assert found.seconds.likely == pytest.approx(10)
