"""Outputs that run in circles: the watch against the definition, and how the engine ends such a sequence."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.repetition import RepetitionWatch
from bulkrun.request import RepetitionStop, Request, SamplingParams
from tests.engine.conftest import EngineFactory, run
from tests.engine.test_stopping import WordMatcher

PROMPT = [100, 3]


def _by_definition(tokens: list[int], limits: RepetitionStop) -> tuple[int, int] | None:
    """The shortest pattern that the tail is made of, often enough and long enough: every length is tried."""
    for length in range(1, limits.max_pattern + 1):
        tails = [n for n in range(length, len(tokens) + 1) if tokens[-n:-length] == tokens[-n + length :]]
        longest = max([n for n in tails if tokens[len(tokens) - n :][:-length] == tokens[-n + length :]], default=0)
        if longest >= max(limits.repeats * length, limits.min_tokens):
            return length, longest // length
    return None


@settings(max_examples=120)
@given(
    pieces=st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 6)), max_size=8),
    max_pattern=st.integers(1, 7),
    repeats=st.integers(2, 5),
    min_tokens=st.integers(2, 16),
)
def test_watch_finds_what_the_definition_says_after_every_token(pieces, max_pattern, repeats, min_tokens) -> None:
    limits = RepetitionStop(max_pattern, repeats, min_tokens)
    watch, tokens = RepetitionWatch(limits), []
    for pattern, times in pieces:
        for token_id in pattern * times:
            tokens.append(token_id)
            assert watch.append(token_id) == _by_definition(tokens, limits), tokens


def test_watch_of_a_long_ordinary_output_remembers_only_a_window() -> None:
    watch = RepetitionWatch(RepetitionStop(64, 4, 48))
    for n in range(20_000):
        assert watch.append(n * n % 7919) is None
    assert len(watch._recent) == 64
    assert sum(map(len, watch._positions.values())) == 64
    assert len(watch._runs) <= 64


def _circles(limits: RepetitionStop | None, **changes: object) -> SamplingParams:
    """Greedy, and fond of what was said before."""
    params = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True, "repetition_stop": limits}
    return SamplingParams(**(params | {"presence_penalty": -0.5} | changes))


@pytest.fixture
def free(make_engine: EngineFactory) -> list[int]:
    """What the model says to PROMPT when nobody stops it."""
    return list(run(make_engine(), [Request("r", PROMPT, _circles(None))])["r"].token_ids)


def test_output_in_circles_ends_with_repetition_and_keeps_its_tokens(
    make_engine: EngineFactory, free: list[int]
) -> None:
    limits = RepetitionStop(max_pattern=16, repeats=2, min_tokens=4)
    end = next(n for n in range(1, 61) if _by_definition(free[:n], limits))
    found = _by_definition(free[:end], limits)
    assert found is not None
    for resumed in (0, 2, end - 1):
        request = Request("r", PROMPT, _circles(limits), output_token_ids=tuple(free[:resumed]))
        completion = run(make_engine(), [request])["r"]
        assert list(completion.token_ids) == free[:end]
        assert (completion.finish_reason, completion.num_output_tokens) == ("repetition", end)
        assert completion.error is not None
        assert completion.error.code == "runaway"
        assert f"pattern of {found[0]} tokens {found[1]} times" in completion.error.message
        assert "sampling.repetition_stop" in completion.error.message


def test_circles_do_not_end_sequences_that_did_not_ask(make_engine: EngineFactory, free: list[int]) -> None:
    limits = RepetitionStop(max_pattern=16, repeats=2, min_tokens=4)
    requests = [Request("asks", PROMPT, _circles(limits)), Request("asks not", PROMPT, _circles(None))]
    completions = run(make_engine(), requests)
    assert completions["asks"].finish_reason == "repetition"
    assert list(completions["asks not"].token_ids) == free


def test_circles_below_the_limits_do_not_count(make_engine: EngineFactory, free: list[int]) -> None:
    never = RepetitionStop(max_pattern=16, repeats=60, min_tokens=60)
    assert all(_by_definition(free[:n], never) is None for n in range(1, 61))
    assert list(run(make_engine(), [Request("r", PROMPT, _circles(never))])["r"].token_ids) == free


def test_end_that_the_model_chose_counts_more_than_circles(make_engine: EngineFactory, free: list[int]) -> None:
    limits = RepetitionStop(max_pattern=16, repeats=2, min_tokens=4)
    end = next(n for n in range(1, 61) if _by_definition(free[:n], limits))
    stop = "".join(f"<{token_id}>" for token_id in free[:end])
    completion = run(
        make_engine(stop_matcher_factory=WordMatcher), [Request("r", PROMPT, _circles(limits, stop=(stop,)))]
    )["r"]
    assert (completion.finish_reason, completion.stop_reason, completion.error) == ("stop", stop, None)
    assert list(completion.token_ids) == free[:end]
