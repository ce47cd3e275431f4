"""Prompts of several texts: one completion with the numbers of each text alone, whatever else is in the engine."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from bulkrun.engine.parts_engine import PartsEngine
from bulkrun.request import Completion, Request, RowError, SamplingParams
from tests.job.fake_engine import VECTOR_NUMBERS, FakeEmbedder, expected_vector

GREEDY = SamplingParams(max_tokens=1, temperature=0)


def request(name: str, *texts: list[int]) -> Request:
    parts = tuple(map(len, texts)) if len(texts) > 1 else ()
    return Request(name, [token for text in texts for token in text], GREEDY, parts=parts)


def ended(engine: PartsEngine) -> dict[str, Completion]:
    made: list[Completion] = []
    while engine.has_unfinished():
        made += engine.step()
    assert len({completion.request_id for completion in made}) == len(made)
    return {completion.request_id: completion for completion in made}


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 64])
def test_numbers_are_those_of_each_text_alone_in_their_order(max_num_seqs: int) -> None:
    texts = {"a": [[1, 2], [3], [1, 2], [4, 5, 6]], "b": [[7, 8]], "c": [[9], [1, 2]], "d": [[n] for n in range(1, 90)]}
    engine = PartsEngine(FakeEmbedder(max_num_seqs=max_num_seqs), "text")
    for name, each in texts.items():
        engine.add_request(request(name, *each))
    done = ended(engine)
    assert done.keys() == texts.keys()
    for name, each in texts.items():
        assert done[name].embedding == b"".join(map(expected_vector, each)) and done[name].error is None
        assert (done[name].num_prompt_tokens, done[name].finish_reason) == (sum(map(len, each)), "stop")
    assert engine.max_num_seqs == max_num_seqs and engine.stats().num_running == 0


def test_equal_texts_of_a_request_are_computed_once() -> None:
    inner = FakeEmbedder(max_num_seqs=2)
    engine, texts = PartsEngine(inner, "text"), [[1], [2, 3], [1], [2], [3, 1], [1]]
    engine.add_request(request("a", *texts))
    assert engine.stats().num_waiting == 4
    computed = []
    add = inner.add_request
    inner.add_request = lambda part: computed.append(tuple(part.prompt_token_ids)) or add(part)  # type: ignore[method-assign,func-returns-value]
    assert ended(engine)["a"].embedding == b"".join(map(expected_vector, texts))
    assert computed == [(1,), (2, 3), (2,), (3, 1)]


def test_one_text_that_fails_is_the_end_of_its_request_alone() -> None:
    engine = PartsEngine(FakeEmbedder(refuse=lambda asked: list(asked.prompt_token_ids) == [3]), "pair")
    for name, each in {"bad": [[1], [3], [2], [3]], "good": [[1], [2]], "alone": [[3]]}.items():
        engine.add_request(request(name, *each))
    done = ended(engine)
    assert done["bad"].error == RowError("engine_error", "pair 1: no")
    assert (done["bad"].finish_reason, done["bad"].embedding, done["bad"].num_prompt_tokens) == ("error", None, 4)
    assert done["alone"].error == RowError("engine_error", "no")
    assert struct.calcsize(f"{2 * VECTOR_NUMBERS}f") == len(done["good"].embedding or b"")


def test_a_side_of_a_pair_that_fails_is_named_by_its_pair() -> None:
    engine = PartsEngine(FakeEmbedder(refuse=lambda asked: list(asked.prompt_token_ids) == [3]), "side")
    engine.add_request(request("a", [1], [2], [1], [3]))
    assert ended(engine)["a"].error == RowError("engine_error", "pair 1, text 1: no")


def test_no_more_goes_in_than_a_few_steps_take() -> None:
    inner = FakeEmbedder(max_num_seqs=2)
    engine = PartsEngine(inner, "text")
    engine.add_request(request("a", *([n] for n in range(1, 100))))
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, len(inner._waiting) + len(inner._running))
    assert most <= 8 and len(inner.seen) == 99


def test_texts_that_have_not_ended_are_counted() -> None:
    engine, left = PartsEngine(FakeEmbedder(max_num_seqs=2), "text"), []
    engine.add_request(request("a", *([n] for n in range(1, 20))))
    engine.add_request(request("b", [1]))
    while engine.has_unfinished():
        engine.step()
        left.append(engine.stats().num_running + engine.stats().num_waiting)
    assert left == list(range(18, -1, -2))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_what_is_dropped_neither_ends_nor_runs_on_and_may_come_again(steps: int) -> None:
    inner = FakeEmbedder(max_num_seqs=2)
    engine = PartsEngine(inner, "text")
    texts: list[Any] = [[n] for n in range(1, 60)]
    engine.add_request(request("a", *texts))
    engine.add_request(request("b", [1], [2]))
    for _ in range(steps):
        assert engine.step() == []
    engine.abort(["a"])
    engine.add_request(request("a", [5], [6]))
    done = ended(engine)
    assert {name: one.embedding for name, one in done.items()} == {
        "a": expected_vector([5]) + expected_vector([6]),
        "b": expected_vector([1]) + expected_vector([2]),
    }
    assert len(inner.seen) < len(texts)
