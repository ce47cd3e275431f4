"""Whatever happens in a step, each request ends exactly once: with its vector, or with the error of its row alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.engine.embedding_engine import EmbeddingEngine
from bulkrun.engine.embedding_loading import EmbeddingSizes
from bulkrun.models.embedding.embedding_model import EmbeddingModel
from bulkrun.request import Completion, Request
from tests.engine.test_embedding_engine import run, vector

SIZES = EmbeddingSizes(
    max_num_seqs=8, max_num_batched_tokens=64, max_model_len=50, device=torch.device("cpu"), async_scheduling=False
)
NOT_A_NUMBER = 13  # a text that begins with this token has no finite vector


class CountingEmbedder:
    """A text's vector is its first token and its length; fails as it is told, step by step."""

    dimensions = 2

    def __init__(self, *, max_tokens: int = 10**9, failures: Sequence[BaseException | None] = ()) -> None:
        self.encoder = SimpleNamespace(config=SimpleNamespace(vocab_size=100), free_scratch=lambda: None)
        self.steps: list[list[int]] = []
        self._max_tokens, self._failures = max_tokens, list(failures)

    def __call__(self, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        failure = self._failures.pop(0) if self._failures else None
        if failure is not None:
            raise failure
        if sum(map(len, texts)) > self._max_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines")
        self.steps.append(list(map(len, texts)))
        vectors = torch.tensor([[float(text[0]), float(len(text))] for text in texts])
        return torch.where(vectors[:, :1] == NOT_A_NUMBER, torch.tensor([float("nan"), 1.0]), vectors)


def engine_of(embedder: CountingEmbedder, **sizes: Any) -> EmbeddingEngine:
    return EmbeddingEngine(cast(EmbeddingModel, embedder), replace(SIZES, **sizes))


def add(engine: EmbeddingEngine, lens: Sequence[int], first_token: int = 7) -> None:
    for number, length in enumerate(lens):
        engine.add_request(Request(str(number), [first_token] * length))


def codes(completions: Sequence[Completion]) -> dict[str, str | None]:
    return {completion.request_id: completion.error and completion.error.code for completion in completions}


def test_out_of_memory_halves_the_steps_and_says_once_what_to_set(caplog: pytest.LogCaptureFixture) -> None:
    embedder = CountingEmbedder(max_tokens=40)
    engine = engine_of(embedder, max_num_batched_tokens=1000)  # which eight texts do not fill
    add(engine, [8] * 20)
    with caplog.at_level(logging.WARNING):
        completions = run(engine)
    assert set(codes(completions).values()) == {None}
    assert max(map(sum, embedder.steps)) == 32
    assert len(caplog.records) == 1
    assert "nothing is lost, going on with steps of 32 tokens" in caplog.text
    assert "engine.max_num_batched_tokens: 32 (CUDA out of memory. Tried to allocate 2.00 GiB.)" in caplog.text


def test_out_of_memory_computes_nothing_of_the_step_before_anew() -> None:
    embedder = CountingEmbedder(failures=[None, MemoryError()])
    engine = engine_of(embedder, async_scheduling=True, max_num_seqs=2)
    add(engine, [3] * 4)
    run(engine)
    assert sum(map(len, embedder.steps)) == 4


def test_a_text_that_finds_no_memory_alone_is_its_rows_error() -> None:
    engine = engine_of(CountingEmbedder(max_tokens=40))
    add(engine, [8, 41, 8, 45])
    completions = run(engine)
    assert codes(completions) == {"0": None, "1": "engine_error", "2": None, "3": "engine_error"}
    error = next(completion.error for completion in completions if completion.request_id == "1")
    assert error is not None
    assert "out of memory for this text of 41 tokens alone" in error.message
    assert "engine.max_model_len" in error.message


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_numbers_that_are_not_finite_are_their_rows_error(async_scheduling: bool) -> None:
    engine = engine_of(CountingEmbedder(), async_scheduling=async_scheduling)
    for number, token in enumerate((7, NOT_A_NUMBER, 8)):
        engine.add_request(Request(str(number), [token] * 3))
    assert codes(run(engine)) == {"0": None, "1": "engine_error", "2": None}


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), RuntimeError("shapes"), OSError(5, "input")])
def test_a_step_that_raises_loses_no_request(failure: BaseException, async_scheduling: bool) -> None:
    engine = engine_of(CountingEmbedder(failures=[None, failure]), async_scheduling=async_scheduling)
    add(engine, [30, 31, 32, 33])
    completions = engine.step()
    with pytest.raises(type(failure)):
        engine.step()
    completions += run(engine)
    assert sorted(codes(completions).items()) == [(str(number), None) for number in range(4)]
    assert len(completions) == 4


def test_a_text_that_is_dropped_while_its_step_is_under_way_does_not_come_back() -> None:
    engine = engine_of(CountingEmbedder(), async_scheduling=True)
    add(engine, [3, 4])
    assert engine.step() == []
    engine.abort(["0"])
    assert codes(engine.step()) == {"1": None}
    assert not engine.has_unfinished()


def test_an_interrupt_between_two_lists_loses_and_doubles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come when a completion is noted and its request not removed yet."""
    engine = engine_of(CountingEmbedder())
    add(engine, [30, 31])
    remove, calls = engine._queue.remove, []

    def interrupted(ids: set[str]) -> None:
        calls.append(ids)
        if len(calls) == 1:
            raise KeyboardInterrupt
        remove(ids)

    monkeypatch.setattr(engine._queue, "remove", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert sorted(completion.request_id for completion in run(engine)) == ["0", "1"]


@given(
    waiting=st.lists(
        st.tuples(st.integers(0, 60), st.integers(-1, 1), st.sampled_from([7, 8, NOT_A_NUMBER, 100])), max_size=30
    ),
    aborted=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 29)), max_size=8),
    failures=st.lists(st.sampled_from([None, None, KeyboardInterrupt(), RuntimeError("x"), MemoryError()]), max_size=8),
    max_num_seqs=st.integers(1, 8),
    async_scheduling=st.booleans(),
)
def test_every_request_ends_exactly_once_unless_aborted(
    waiting: list[tuple[int, int, int]],
    aborted: list[tuple[int, int]],
    failures: list[BaseException | None],
    max_num_seqs: int,
    async_scheduling: bool,
) -> None:
    embedder = CountingEmbedder(max_tokens=48, failures=failures)
    engine = engine_of(embedder, max_num_seqs=max_num_seqs, async_scheduling=async_scheduling)
    for number, (length, priority, token) in enumerate(waiting):
        engine.add_request(Request(str(number), [token] * length, priority=priority))
    completions: list[Completion] = []
    gone: set[str] = set()
    for step in range(500):
        if not engine.has_unfinished():
            break
        ids = {str(number) for when, number in aborted if when == step}
        engine.abort(list(ids))
        gone |= ids
        try:
            completions += engine.step()
        except (KeyboardInterrupt, RuntimeError):
            continue
    ended = [completion.request_id for completion in completions]
    assert len(ended) == len(set(ended))
    everybody = {str(number) for number in range(len(waiting))}
    assert everybody - gone <= set(ended) <= everybody
    for completion in completions:
        length, _, token = waiting[int(completion.request_id)]
        assert completion.num_prompt_tokens == length
        if completion.error is None:
            assert vector(completion).tolist() == [token, length]
        elif 0 < length <= 50 and token != 100:
            assert completion.error.code == "engine_error"
