"""Length estimates and the peak-memory formula, against brute force."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.admission import Growth, Growths, OutputLengthEstimator
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Request, SamplingParams


def _sequence(num_output: int, max_tokens: int, *, can_stop: bool = True) -> Sequence:
    request = Request(
        "r",
        [1, 2, 3],
        SamplingParams(max_tokens=max_tokens),
    )
    eos_token_ids = frozenset([0]) if can_stop else frozenset()
    seq = Sequence(request, arrival=0, max_model_len=10_000, eos_token_ids=eos_token_ids)
    seq.token_ids.extend([5] * num_output)
    return seq


def _simulated_peak(growths: list[Growth]) -> int:
    """Step by step: everyone alive grows by one, then those with nothing left to add end."""
    peak = 0
    for time in range(max((g.remaining_tokens for g in growths), default=0) + 1):
        alive = [g for g in growths if g.remaining_tokens >= time]
        peak = max(peak, sum(g.held_tokens + time for g in alive))
    return peak


@settings(max_examples=200)
@given(
    *[st.lists(st.builds(Growth, st.integers(0, 50), st.integers(1, 40)), max_size=6)] * 2,
    st.integers(0, 9),
    st.integers(0, 200),
)
def test_what_fits_is_what_a_step_by_step_simulation_has_room_for(
    running: list[Growth], later: list[Growth], shared: int, more_than_the_peak: int
) -> None:
    growths = Growths(running, block_size=1)
    for growth in later:
        peak = _simulated_peak([*running, growth])
        num_used = shared + sum(held for held, _ in running)
        assert growths.fit_with(growth, 1 + peak + shared + more_than_the_peak, num_used)
        assert not growths.fit_with(growth, peak + shared - 1, num_used)
        growths.add(growth)
        running = [*running, growth]


@given(
    st.lists(st.builds(Growth, st.integers(0, 50), st.integers(1, 40)), min_size=1, max_size=6),
    st.integers(1, 20),
    st.integers(0, 9),
)
def test_blocks_for_everyone_to_the_end_are_enough(growing: list[Growth], block_size: int, num_shared: int) -> None:
    *running, last = growing
    at_the_ends = sum(-(-sum(growth) // block_size) for growth in growing)
    num_used = num_shared + sum(-(-growth.held_tokens // block_size) for growth in running)
    assert Growths(running, block_size).fit_with(last, at_the_ends + num_shared, num_used)


def test_limit_is_reserved_while_nothing_is_known() -> None:
    assert OutputLengthEstimator().remaining_tokens(_sequence(10, 100)) == 90


def test_sequence_that_nothing_can_stop_runs_to_its_limit() -> None:
    estimator = OutputLengthEstimator()
    for _ in range(100):
        estimator.observe(3)
    assert estimator.remaining_tokens(_sequence(2, 100, can_stop=False)) == 98


def test_samples_that_got_as_long_as_this_one_decide() -> None:
    estimator = OutputLengthEstimator()
    for length in [2] * 90 + [50] * 10:
        estimator.observe(length)
    assert estimator.remaining_tokens(_sequence(0, 100)) == 2
    assert estimator.remaining_tokens(_sequence(5, 100)) == 45
    assert estimator.remaining_tokens(_sequence(60, 100)) == 40  # longer than anything seen


def test_only_the_latest_outputs_count() -> None:
    estimator = OutputLengthEstimator()
    for length in [9] * 600 + [3] * 512:
        estimator.observe(length)
    assert estimator.remaining_tokens(_sequence(0, 100)) == 3


def test_preemption_makes_cautious_and_finishing_relaxes() -> None:
    estimator = OutputLengthEstimator()
    for _ in range(50):
        estimator.observe(4)
    estimator.observe_preemption()
    assert estimator.remaining_tokens(_sequence(0, 100)) == 100
    for _ in range(300):
        estimator.observe(4)
    assert estimator.remaining_tokens(_sequence(0, 100)) == 4


def test_window_stays_sorted_whatever_is_observed() -> None:
    rng = random.Random(0)
    estimator = OutputLengthEstimator()
    for _ in range(2000):
        estimator.observe(rng.randint(1, 30))
    assert estimator._sorted == sorted(estimator._recent)
