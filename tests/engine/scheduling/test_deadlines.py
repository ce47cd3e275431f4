"""Time limits of requests, on a clock that the test moves: wherever the sequence is when its time is over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bulkrun.engine.scheduling.deadlines import Deadlines
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, expect_short_outputs, generate_with_transformers, preempted
from tests.models.tiny_models import VOCAB_SIZE

PROMPT = [17, 5, 99, 42, 63]


class Clock:
    """Stands still until somebody moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def _limited(timeout_s: float | None, max_tokens: int = 30) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, timeout_s=timeout_s)


def _steps(engine, count: int = 5000) -> dict[str, Completion]:
    completions: dict[str, Completion] = {}
    for _ in range(count):
        if not engine.has_unfinished():
            break
        completions |= {completion.request_id: completion for completion in engine.step()}
    return completions


@pytest.fixture(scope="module")
def free() -> list[int]:
    return generate_with_transformers("llama", PROMPT, 30, eos_token_id=None)


def test_request_over_its_time_ends_with_timeout_and_its_tokens(make_engine: EngineFactory, free: list[int]) -> None:
    clock = Clock()
    engine = make_engine(clock=clock)
    engine.add_request(Request("slow", PROMPT, _limited(2.5)))
    engine.add_request(Request("free", PROMPT, _limited(None)))
    engine.add_request(Request("later", PROMPT, _limited(60.0)))
    assert _steps(engine, 7) == {}
    clock.now += 2.4
    assert _steps(engine, 1) == {}
    clock.now += 0.2
    (completion,) = engine.step()
    assert completion.request_id == "slow"
    assert (completion.finish_reason, completion.stop_reason) == ("timeout", None)
    assert list(completion.token_ids) == free[:8]
    assert completion.error is not None
    assert completion.error.code == "timeout"
    assert "2.5 s" in completion.error.message
    assert "run.row_timeout" in completion.error.message
    rest = _steps(engine)
    assert {name: list(completion.token_ids) for name, completion in rest.items()} == {"free": free, "later": free}
    assert engine.stats().kv_cache_usage == 0


def test_time_starts_with_the_first_scheduled_step_not_with_waiting(
    make_engine: EngineFactory, free: list[int]
) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_num_seqs=1)
    engine.add_request(Request("first", PROMPT, _limited(None)))
    engine.add_request(Request("second", PROMPT, _limited(1.0)))
    _steps(engine, 5)
    clock.now += 100.0
    completions = _steps(engine)
    assert [list(completions[name].token_ids) for name in ("first", "second")] == [free, free]


def test_request_that_is_only_prefilling_times_out(make_engine: EngineFactory, free: list[int]) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_num_seqs=2, max_num_batched_tokens=8)
    engine.add_request(Request("long", list(range(3, 103)), replace(_limited(1.0), prompt_logprobs=1)))
    engine.add_request(Request("next", PROMPT, _limited(None)))
    _steps(engine, 2)
    clock.now += 1.0
    completions = _steps(engine, 1)
    assert (completions["long"].finish_reason, completions["long"].token_ids) == ("timeout", ())
    assert completions["long"].prompt_logprobs is None  # half a prompt's would look like a whole one's
    assert list(_steps(engine)["next"].token_ids) == free
    assert engine.stats().kv_cache_usage == 0


def test_preempted_request_times_out_and_keeps_its_tokens(make_engine: EngineFactory) -> None:
    clock = Clock()
    engine = make_engine(clock=clock, max_model_len=90, kv_cache_memory_bytes=110_000, enable_prefix_caching=False)
    engine._sequences.eos_token_ids = frozenset([VOCAB_SIZE + 1])
    expect_short_outputs(engine.scheduler)
    params = SamplingParams(max_tokens=40, temperature=0.0, timeout_s=5.0)
    for number in range(12):
        engine.add_request(Request(str(number), [number + 3] * 7, params))
    while not preempted(engine.scheduler):
        assert _steps(engine, 1) == {}
    waiting = {seq.request.request_id: seq.output_token_ids for seq in preempted(engine.scheduler)}
    clock.now += 5.0
    completions = {completion.request_id: completion for completion in engine.step()}
    for request_id, token_ids in waiting.items():
        assert completions[request_id].finish_reason == "timeout"
        assert completions[request_id].token_ids == token_ids
    assert len(_steps(engine)) + len(completions) == 12
    assert engine.stats().kv_cache_usage == 0


def test_whoever_gets_a_row_again_has_no_more_time_than_before() -> None:
    clock = Clock()
    deadlines, seq = Deadlines(clock), Sequence(Request("r", PROMPT, _limited(5.0)), arrival=0, max_model_len=99)
    deadlines.start([seq])
    clock.now += 3.0
    deadlines.start([seq])
    assert deadlines.expired() == []
    clock.now += 2.0
    assert deadlines.expired() == [seq]


def test_ended_and_aborted_requests_leave_no_deadline(make_engine: EngineFactory) -> None:
    engine = make_engine(clock=Clock())
    for name in ("ends", "aborted"):
        engine.add_request(Request(name, PROMPT, _limited(9.0, max_tokens=3)))
    engine.step()
    engine.abort(["aborted"])
    _steps(engine)
    assert not engine._deadlines._deadlines
