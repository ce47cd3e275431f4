"""After a step that was broken off, and beside rows without numbers, everybody gets what they would get alone."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import bulkrun.engine
from bulkrun.engine import recovery
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.request import Completion, Request, SamplingParams
from tests.engine.conftest import EngineFactory, run
from tests.models.tiny_models import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True, logprobs=2)
SHARED = [3 + 7 * n % (VOCAB_SIZE - 4) for n in range(18)]
NAN_TOKEN = VOCAB_SIZE - 1
SETTINGS = {"max_num_seqs": 4, "max_model_len": 64, "max_num_batched_tokens": 20, "kv_cache_memory_bytes": 2**17}


def requests() -> list[Request]:
    """More than run at once, with a prefix in common; two of one prompt."""
    ends = [[5], [6, 7, 8, 9, 10], [5], [11, 12], [13], [14, 15, 16]]
    params = [GREEDY, DRAWN, GREEDY, DRAWN, GREEDY, DRAWN]
    return [Request(f"r{i}", [*SHARED, *end], params[i], seed=i) for i, end in enumerate(ends)]


def tokens(completions: dict[str, Completion]) -> dict[str, tuple[int, ...]]:
    return {name: done.token_ids for name, done in completions.items()}


def go_on(engine: LLMEngine) -> Iterator[Completion]:
    for _ in range(500):
        if not engine.has_unfinished():
            return
        yield from engine.step()
    raise AssertionError("did not finish")


@contextmanager
def broken_off_at(line: int) -> Iterator[list[int]]:
    """Ctrl-C at the so many-th line of engine code within; what is done about it is spared."""
    folder, spared = (
        str(Path(bulkrun.engine.__file__).parent),
        ("step", "_start_over", "start_over", "forget_step", "restart", "wait_for_masks", "wait_for_threads"),
    )
    left = [line]

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(folder) or code.co_name in spared or code.co_filename == recovery.__file__:
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(None)


def interrupted(engine: LLMEngine, line: int) -> tuple[dict[str, Completion], bool]:
    """All completions, with one interruption on the way; and whether it came to that."""
    done: list[Completion] = []
    for request in requests():
        engine.add_request(request)
    with suppress(KeyboardInterrupt), broken_off_at(line) as left:
        for completion in go_on(engine):
            done.append(completion)
    done += go_on(engine)
    assert len({one.request_id for one in done}) == len(done), "somebody ended twice"
    assert engine.stats().kv_cache_usage == 0
    return {one.request_id: one for one in done}, left[0] <= 0


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("stride", [997, pytest.param(13, marks=pytest.mark.slow)])
def test_a_step_may_be_broken_off_anywhere(make_engine: EngineFactory, async_scheduling: bool, stride: int) -> None:
    engine = make_engine(**SETTINGS, async_scheduling=async_scheduling)
    expected = run(engine, requests())
    for line in range(1, 10**6, stride):
        found, was_broken_off = interrupted(engine, line)
        assert tokens(found) == tokens(expected), f"broken off at line {line}"
        assert [one.error for one in found.values()] == [None] * len(found)
        if not was_broken_off:
            return


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("of the driver")])
@pytest.mark.parametrize("where", ["compute", "sample"])
def test_what_was_never_computed_is_not_shared(
    make_engine: EngineFactory, where: str, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(**SETTINGS)
    expected = run(make_engine(**SETTINGS), requests())

    def fail(*args: object) -> None:
        raise error

    for request in requests():
        engine.add_request(request)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner, where, fail)
        with pytest.raises(type(error)):
            engine.step()
    engine.abort([request.request_id for request in requests()])
    assert tokens(run(engine, requests())) == tokens(expected)


class BrokenOnce:
    """A matcher of a stop string that does not come, and whose second token is interrupted once."""

    seen = 0

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.token_ids: list[int] = []

    def append(self, token_id: int) -> None:
        BrokenOnce.seen += 1
        if BrokenOnce.seen == 2:
            raise KeyboardInterrupt
        self.token_ids.append(token_id)


def test_who_watches_over_a_sequence_sees_every_token_once(make_engine: EngineFactory) -> None:
    matchers: list[BrokenOnce] = []

    def factory(stop: tuple[str, ...]) -> BrokenOnce:
        matchers.append(BrokenOnce(stop))
        return matchers[-1]

    BrokenOnce.seen = 0
    engine = make_engine(**SETTINGS, stop_matcher_factory=factory)
    engine.add_request(
        Request("a", SHARED, SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, stop=("x",)))
    )
    with pytest.raises(KeyboardInterrupt):
        list(go_on(engine))
    (done,) = go_on(engine)
    assert len(done.token_ids) == 5
    assert tuple(matchers[-1].token_ids) == done.token_ids


def poisoned_engine(make_engine: EngineFactory, variant: str = "llama", **settings: Any) -> LLMEngine:
    """Whoever has NAN_TOKEN in the prompt has no numbers."""
    engine = make_engine(variant, **{**SETTINGS, "max_num_batched_tokens": 200, "max_num_seqs": 8, **settings})
    model = engine.model_runner.model
    decoder = model if isinstance(model, Decoder) else model.model
    decoder.embed_weight[NAN_TOKEN] = math.nan
    return engine


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("at_once", [True, False], ids=["one step", "later"])
def test_a_row_without_numbers_spoils_nobody_who_shares_its_prefix(
    make_engine: EngineFactory, at_once: bool, deterministic: bool
) -> None:
    engine = poisoned_engine(make_engine, deterministic=deterministic)
    bad, good = Request("bad", [*SHARED, 3, NAN_TOKEN, 4], GREEDY), requests()
    expected = run(make_engine(**SETTINGS, deterministic=deterministic), good)
    if at_once:
        found = run(engine, [bad, *good])
        assert found["bad"].error is not None and found["bad"].error.code == "engine_error"
    else:
        engine.add_request(bad)
        engine.scheduler.max_num_batched_tokens = 21  # its first 21 tokens, with the NaN
        engine.step()
        engine.abort(["bad"])
        engine.scheduler.max_num_batched_tokens = 200
        found = run(engine, good)
    for one in good:
        assert found[one.request_id].error is None
        assert found[one.request_id].token_ids == expected[one.request_id].token_ids


@pytest.mark.parametrize("variant", ["llama", "mamba"])  # the second has no keys whose blocks are cleared
def test_a_row_without_numbers_is_told_once_and_counts_no_tokens(make_engine: EngineFactory, variant: str) -> None:
    engine = poisoned_engine(make_engine, variant)
    done = run(engine, [Request("bad", [5, NAN_TOKEN], GREEDY)])["bad"]
    assert done.error is not None and done.num_output_tokens == 0
    assert engine.stats().num_output_tokens == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_state_without_numbers_reaches_nobody(make_engine: EngineFactory, ahead: bool) -> None:
    """Of a prefix that is kept with them, and of a row that another had."""
    long, settings = [3 + 5 * n % (VOCAB_SIZE - 4) for n in range(40)], {"async_scheduling": ahead, "max_num_seqs": 2}
    engine = poisoned_engine(make_engine, "qwen3_5", **settings, max_model_len=128, kv_cache_memory_bytes=2**20)
    bad = [Request(f"bad{n}", [*long, NAN_TOKEN, *long, n], GREEDY) for n in (5, 6, 7)]
    good = [Request(f"good{n}", [*long, 9, 9, n], GREEDY) for n in (5, 6, 7)]
    expected = tokens(run(make_engine("qwen3_5", max_num_seqs=1), good))
    for _ in range(2):
        found = run(engine, [*bad, *good])
        assert all(found[one.request_id].error is not None for one in bad)
        assert {one.request_id: found[one.request_id].token_ids for one in good} == expected


def test_what_is_no_number_does_not_stay_in_the_cache(make_engine: EngineFactory) -> None:
    """Whoever owns a block next masks its old slots, but 0 * NaN is NaN."""
    engine = poisoned_engine(make_engine)
    run(engine, [Request("bad", [*SHARED, NAN_TOKEN, 4], GREEDY)])
    assert all(cached.isfinite().all() for cached in engine.model_runner.kv_cache.tensors)


@pytest.mark.parametrize("reads_prefix", [False, True])
def test_taking_out_rows_without_numbers_may_be_broken_off(
    make_engine: EngineFactory, reads_prefix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = poisoned_engine(make_engine)
    bad, good = Request("bad", [*SHARED, NAN_TOKEN, 4], GREEDY), requests()[0]
    if reads_prefix:
        run(engine, [Request("before", SHARED, GREEDY)])
    expected = run(make_engine(**SETTINGS), [good])
    for request in (bad, good):
        engine.add_request(request)

    def broken_off(block_ids: list[int]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.model_runner, "clear_blocks", broken_off)
        list(go_on(engine))
    done = {one.request_id: one for one in go_on(engine)}
    assert done["bad"].error is not None and done["bad"].error.code == "engine_error"
    assert done[good.request_id].token_ids == expected[good.request_id].token_ids


def test_ends_that_the_model_does_not_know_end_nothing(
    make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(**SETTINGS)
    strange = LLMEngine(engine.model_runner.model, engine.config, eos_token_ids=(2, VOCAB_SIZE, -1))
    assert f"[-1, {VOCAB_SIZE}]" in caplog.text
    params = SamplingParams(max_tokens=6, min_tokens=3, temperature=0.0)
    assert len(run(strange, [Request("a", SHARED, params)])["a"].token_ids) >= 3


def test_a_seed_of_more_than_64_bits_is_that_row_s_error(make_engine: EngineFactory) -> None:
    done = run(make_engine(**SETTINGS), [Request("a", SHARED, DRAWN, seed=2**63), Request("b", SHARED, DRAWN, seed=3)])
    assert done["a"].error is not None and "2^63" in done["a"].error.message
    assert done["b"].error is None


def test_whoever_ended_in_a_step_that_was_broken_off_does_not_run_out_of_time_later(make_engine: EngineFactory) -> None:
    now = [0.0]

    class Matcher:
        was_broken_off = False

        def append(self, token_id: int) -> str | None:
            if not Matcher.was_broken_off:
                Matcher.was_broken_off = True
                raise KeyboardInterrupt
            return None

    engine = make_engine(stop_matcher_factory=lambda stop: Matcher(), clock=lambda: now[0])
    ends = SamplingParams(max_tokens=1, temperature=0.0, timeout_s=5)
    engine.add_request(Request("ends", [5, 6, 7, 8], ends))
    engine.add_request(Request("breaks", [5, 6, 7, 9], SamplingParams(max_tokens=3, ignore_eos=True, stop=("x",))))
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    now[0] = 10.0
    assert sorted((done.request_id, done.finish_reason) for done in go_on(engine)) == [
        ("breaks", "length"),
        ("ends", "length"),
    ]
