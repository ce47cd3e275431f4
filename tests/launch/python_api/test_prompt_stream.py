"""Prompts through an engine, as an iterator: all of them, in order, a bounded number at a time."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.work.answers import AnswerReader
from bulkrun.launch.python_api import prompt_stream
from bulkrun.launch.python_api.prompt_stream import Asked, PromptStream, SharedEngine
from bulkrun.launch.python_api.text_outputs import RequestOutput, TextOutputs
from bulkrun.request import Completion, Request, RowError, SamplingParams
from tests.job.fake_engine import FakeEngine, decode, expected_tokens

SAMPLING = SamplingParams(max_tokens=9, temperature=0.5, logprobs=0)
COLUMNS = [pa.field("cumulative_logprob", pa.float64())]


def asked(number: int) -> Asked:
    if number % 7 == 3:
        return Asked(None, None, SAMPLING, number, RowError("bad_input", "no"))
    if number % 7 == 5:
        return Asked(None, [number], SAMPLING, number)
    return Asked(f"prompt {number}", None, SAMPLING, number)


def encode(some: Sequence[Asked]) -> list[list[int]]:
    return [[ord(letter) for letter in one.text or ""] for one in some]


def answer(number: int) -> str | None:
    """What the fake model must say, by its rule alone."""
    one = asked(number)
    if one.error is not None:
        return None
    ids = one.token_ids if one.text is None else encode([one])[0]
    assert ids is not None
    return decode([expected_tokens(Request("", ids, SAMPLING, number))])[0]


def stream(shared: SharedEngine, prompts: Iterator[Asked], ordered: bool = True) -> Iterator[RequestOutput]:
    return PromptStream(shared, TextOutputs(AnswerReader(decode, COLUMNS)), encode, prompts, ordered=ordered).outputs()


@settings(max_examples=40)
@given(st.integers(0, 60), st.integers(1, 9), st.booleans())
def test_every_prompt_comes_out_once_and_reading_stays_within_the_window(
    count: int, max_num_seqs: int, ordered: bool
) -> None:
    read = handed_out = ahead = 0

    def prompts() -> Iterator[Asked]:
        nonlocal read, ahead
        for number in range(count):
            read += 1
            ahead = max(ahead, read - handed_out)
            yield asked(number)

    outputs = []
    for output in stream(SharedEngine(FakeEngine(max_num_seqs)), prompts(), ordered):
        outputs.append(output)
        handed_out += 1
    if ordered:
        assert [output.index for output in outputs] == list(range(count))
    assert {output.index: output.text for output in outputs} == {number: answer(number) for number in range(count)}
    assert all((output.error is None) == (output.text is not None) for output in outputs)
    assert ahead <= 2 * max_num_seqs


def test_an_endless_iterator_can_be_read_for_as_long_as_one_likes() -> None:
    engine = FakeEngine(4)

    def endless() -> Iterator[Asked]:
        number = 0
        while True:
            yield asked(number)
            number += 1

    outputs = stream(SharedEngine(engine), endless())
    assert [next(outputs).text for _ in range(500)] == [answer(number) for number in range(500)]
    outputs.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished(), "what was read ahead is dropped"


def test_two_iterators_on_one_engine_do_not_take_each_others_outputs() -> None:
    shared = SharedEngine(FakeEngine(3))
    one = stream(shared, map(asked, range(0, 40)))
    other = stream(shared, map(asked, range(100, 140)))
    pairs = list(zip(one, other, strict=True))
    assert [(a.text, b.text) for a, b in pairs] == [(answer(n), answer(100 + n)) for n in range(40)]


def test_an_iterator_may_be_closed_when_what_it_waited_for_ended_in_anothers_step() -> None:
    engine = FakeEngine(3)
    shared = SharedEngine(engine)
    one = stream(shared, map(asked, range(0, 40)))
    other = stream(shared, map(asked, range(100, 140)))
    next(one)
    assert len(list(other)) == 40
    one.close()  # type: ignore[attr-defined]
    assert not engine.has_unfinished()


class OneAtATime(FakeEngine):
    """Refuses what an engine cannot bear: two threads inside it. Lets others run wherever it is."""

    def __init__(self, max_num_seqs: int) -> None:
        super().__init__(max_num_seqs)
        self._inside = 0

    def _alone(self, call: Callable[[], Any]) -> Any:
        self._inside += 1
        time.sleep(0.0001)
        assert self._inside == 1, "two threads are inside the engine"
        found = call()
        self._inside -= 1
        return found

    def add_request(self, request: Request) -> None:
        self._alone(lambda: super(OneAtATime, self).add_request(request))

    def step(self) -> list[Completion]:
        return list(self._alone(super().step))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._alone(lambda: super(OneAtATime, self).abort(request_ids))


def test_threads_take_turns_at_an_engine_and_get_their_own_outputs() -> None:
    engine = OneAtATime(3)
    shared = SharedEngine(engine)

    def ask(first: int) -> list[str | None]:
        return [output.text for output in stream(shared, map(asked, range(first, first + 40)))]

    firsts = range(0, 400, 100)
    with ThreadPoolExecutor(len(firsts)) as pool:
        texts = list(pool.map(ask, firsts))
    assert texts == [[answer(number) for number in range(first, first + 40)] for first in firsts]
    assert not engine.has_unfinished()


def test_an_iterator_that_is_abandoned_in_anothers_turn_is_dropped_before_the_next() -> None:
    """As garbage collection may do it, in the thread whose turn it is."""

    class Collecting(FakeEngine):
        garbage: Iterator[RequestOutput] | None = None

        def step(self) -> list[Completion]:
            if self.garbage is not None:
                self.garbage.close()  # type: ignore[attr-defined]
            return super().step()

    engine = Collecting(3)
    shared = SharedEngine(engine)
    abandoned = stream(shared, map(asked, range(100, 140)))
    next(abandoned)
    engine.garbage = abandoned
    one = stream(shared, map(asked, range(0, 40)))
    assert [output.text for output in one] == [answer(number) for number in range(40)]
    assert not engine.has_unfinished()


def test_ctrl_c_while_outputs_are_read_stays_ctrl_c() -> None:
    def interrupted(*_: object) -> list[str]:
        raise KeyboardInterrupt

    engine = FakeEngine(3)
    outputs = PromptStream(
        SharedEngine(engine),
        TextOutputs(AnswerReader(interrupted, COLUMNS)),
        encode,
        map(asked, range(9)),
        ordered=True,
    ).outputs()
    with pytest.raises(KeyboardInterrupt):
        list(outputs)
    assert not engine.has_unfinished()


def interrupt_at(number: int) -> Callable[[Any, str, Any], Any]:
    """Ctrl-C at that line of the module's that is run; not as a `with` is left, where CPython looks away."""
    lines = Path(prompt_stream.__file__).read_text().splitlines()
    left = number

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != prompt_stream.__file__:
            return None
        if event == "line" and not lines[frame.f_lineno - 1].strip().startswith("with "):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def test_ctrl_c_at_any_moment_of_a_call_loses_nothing_that_another_waits_for() -> None:
    for number in range(1, 1000, 3):
        shared = SharedEngine(FakeEngine(4))
        other = stream(shared, map(asked, range(100, 109)))
        first = next(other).text
        before = sys.gettrace()
        sys.settrace(interrupt_at(number))
        try:
            list(stream(shared, map(asked, range(4))))
            return
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        shared.step = limited(shared.step)  # type: ignore[method-assign]
        assert [first, *(output.text for output in other)] == [answer(row) for row in range(100, 109)]
        assert [output.text for output in stream(shared, map(asked, range(3)))] == [answer(row) for row in range(3)]
        assert not shared.engine.has_unfinished()
    raise AssertionError("a call of so few prompts has fewer lines")


def limited(step: Callable[[], None]) -> Callable[[], None]:
    """The step, for as often as it can have something to do."""
    left = itertools.count(200, -1)

    def checked() -> None:
        assert next(left), "waits for what nobody works on"
        step()

    return checked


def test_a_long_output_holds_up_an_ordered_stream_only() -> None:
    long = SamplingParams(max_tokens=400, temperature=0.5, logprobs=0)
    [ids] = encode([Asked("long", None, SAMPLING, 0)])
    seed = next(seed for seed in range(100) if len(expected_tokens(Request("", ids, long, seed))) > 200)
    prompts = [Asked("long", None, long, seed), *(asked(number) for number in range(7, 40))]
    by_end = [output.index for output in stream(SharedEngine(FakeEngine(4)), iter(prompts), ordered=False)]
    assert by_end[-1] == 0 and sorted(by_end) == list(range(34))


def test_an_engine_that_refuses_a_prompt_gives_an_output_with_its_error() -> None:
    engine = FakeEngine(refuse=lambda request: request.seed == 2)
    outputs = list(stream(SharedEngine(engine), map(asked, range(3))))
    assert [output.error and output.error.code for output in outputs] == [None, None, "nan_logits"]
