"""Priorities: who goes first, who gives way, and that nobody's tokens change for it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.batching import ContinuousBatching
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.scheduling.waiting import WaitingQueue
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import EngineFactory, expect_short_outputs, preempted, run

GREEDY = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
RANDOM = SamplingParams(max_tokens=14, temperature=0.9, ignore_eos=True)


def _scheduler(
    *, num_blocks: int = 60, max_num_seqs: int = 2, budget: int = 32, enable_prefix_caching: bool = False
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=enable_prefix_caching,
        policy=ContinuousBatching(max_num_seqs),
    )


def _sequence(number: int, priority: int, num_output_tokens: int = 6, num_prompt_tokens: int = 3) -> Sequence:
    params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
    request = Request(str(number), [1] * num_prompt_tokens, params, priority=priority)
    return Sequence(request, arrival=number, max_model_len=1000)


def _step(scheduler: Scheduler) -> tuple[ScheduledBatch, list[Sequence]]:
    batch = scheduler.schedule()
    due = [seq for index, seq in enumerate(batch.seqs) if batch.samples(index)]
    for seq in due:
        seq.token_ids.append(1)
    ended = [seq for seq in due if seq.num_tokens >= seq.max_num_tokens]
    scheduler.finish(ended)
    return batch, ended


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), max_size=30))
def test_the_queue_is_sorted_by_priority_and_arrival_whatever_goes_in_and_out(moves: list[tuple[int, bool]]) -> None:
    queue, expected = WaitingQueue(), []
    for number, (priority, pops) in enumerate(moves):
        if pops and expected:
            assert queue.pop().order == expected.pop(0)
        queue.add(_sequence(number, priority))
        insort(expected, (priority, number))
        assert [seq.order for seq in queue] == expected
        assert queue.head.order == expected[0]


@settings(max_examples=300)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(1, 150),
    st.integers(0, 3),
    st.booleans(),
)
def test_no_more_give_way_than_must(
    others: list[tuple[int, int, int]], num_prompt_tokens: int, num_steps: int, shares: bool
) -> None:
    """The fewest of the cheapest, and nobody where the urgent one would not get in all the same."""
    scheduler = _scheduler(num_blocks=60, max_num_seqs=8, budget=5000, enable_prefix_caching=shares)
    for number, (priority, prompt, output) in enumerate(others):
        scheduler.add(_sequence(number, priority, output, prompt - prompt % 4 + 1))
    for _ in range(num_steps):
        _step(scheduler)
    assume(all(seq.num_tokens <= 4 * len(seq.block_table) for seq in scheduler.running))  # or growth takes blocks first
    urgent = _sequence(99, -1, 5, num_prompt_tokens)
    assume(not scheduler.waiting or scheduler.waiting.head.priority > -1)
    scheduler.add(urgent)
    before = {seq: seq.num_preemptions for seq in scheduler.running}
    expected = _fewest_victims(scheduler, urgent.arrival)
    batch = scheduler.schedule()
    gave_way = {seq.arrival for seq, count in before.items() if seq.num_preemptions > count}
    assert gave_way == (expected or set())
    assert (urgent in batch.new_seqs) == (expected is not None)


def _fewest_victims(scheduler: Scheduler, urgent: int) -> set[int] | None:
    """By trying: with so many of the cheapest gone and nobody else to give way, the urgent one gets in; None: never."""
    worse = [seq for seq in scheduler.running if seq.priority > -1]
    worse.sort(key=lambda seq: (-seq.priority, seq.num_computed_tokens, -seq.arrival))
    for count in range(len(worse) + 1):
        copy = deepcopy(scheduler)
        copy.abort({seq.request.request_id for seq in worse[:count]})
        for seq in copy.running:
            seq.priority = -1
        if urgent in [seq.arrival for seq in copy.schedule().new_seqs]:
            return {seq.arrival for seq in worse[:count]}
    return None


def test_smaller_priority_is_admitted_first_and_equals_in_order_of_arrival() -> None:
    scheduler = _scheduler(max_num_seqs=5)
    for number, priority in enumerate([2, 0, 1, 0, -1]):
        scheduler.add(_sequence(number, priority))
    assert [seq.arrival for seq in scheduler.schedule().new_seqs] == [4, 1, 3, 2, 0]


def test_a_better_priority_takes_the_row_of_the_worst_one_that_runs() -> None:
    scheduler = _scheduler(max_num_seqs=2)
    slow = [_sequence(0, 5), _sequence(1, 9)]
    for seq in slow:
        scheduler.add(seq)
    _step(scheduler)
    scheduler.add(_sequence(2, 1))
    batch, _ = _step(scheduler)
    assert sorted(seq.arrival for seq in batch.seqs) == [0, 2]
    assert [seq.num_preemptions for seq in slow] == [0, 1]
    assert preempted(scheduler) == [slow[1]]


def test_a_better_priority_takes_the_memory_of_worse_ones() -> None:
    scheduler = _scheduler(num_blocks=1 + 8, max_num_seqs=4)
    for number in range(2):
        scheduler.add(_sequence(number, 7, num_output_tokens=8))  # 11 tokens are 3 blocks each
    _step(scheduler)
    urgent = _sequence(2, 0, num_prompt_tokens=18, num_output_tokens=4)  # 6 blocks of the 8
    scheduler.add(urgent)
    batch, _ = _step(scheduler)
    assert batch.new_seqs == [urgent]
    assert [seq.arrival for seq in preempted(scheduler)][-1:] == [1]


def test_nobody_gives_way_to_one_who_would_not_fit_anyway() -> None:
    """Memory, and rows: what stays is too much for it to come in, so the others go on."""
    scheduler = _scheduler(num_blocks=1 + 20, max_num_seqs=4, budget=128)
    stays = _sequence(0, 0, num_prompt_tokens=48)  # 13 blocks of the 20
    small = _sequence(1, 1, num_prompt_tokens=12)  # 4 blocks
    for seq in (stays, small):
        scheduler.add(seq)
    _step(scheduler)
    scheduler.add(_sequence(2, 0, num_prompt_tokens=40))  # 10 blocks, or more than 7
    batch, _ = _step(scheduler)
    assert (batch.seqs, scheduler.num_preemptions) == ([stays, small], 0)


class Uncounted(list[int]):
    """A block table that must not be walked through."""

    def __iter__(self) -> Iterator[int]:
        raise AssertionError


def test_the_blocks_of_what_runs_on_are_not_counted_while_the_head_waits() -> None:
    """It is asked in every step, and there may be a million blocks."""
    scheduler = _scheduler(num_blocks=1 + 20, max_num_seqs=4, budget=128)
    for number, (priority, num_prompt_tokens) in enumerate([(0, 48), (1, 12)]):  # 13 blocks of the 20, and 4
        scheduler.add(_sequence(number, priority, num_prompt_tokens=num_prompt_tokens))
    _step(scheduler)
    scheduler.add(_sequence(2, 0, num_prompt_tokens=40))
    scheduler.running[0].block_table = Uncounted(scheduler.running[0].block_table)
    assert scheduler.schedule().seqs == scheduler.running[:2] and scheduler.num_preemptions == 0


def test_a_better_priority_does_not_wait_behind_one_that_did_not_fit() -> None:
    scheduler = _scheduler(num_blocks=1 + 20, max_num_seqs=4, budget=128)
    scheduler.add(_sequence(0, 0, num_prompt_tokens=40, num_output_tokens=20))
    _step(scheduler)
    scheduler.add(_sequence(1, 1, num_prompt_tokens=60))
    assert not _step(scheduler)[0].new_seqs
    small = _sequence(2, 0, num_prompt_tokens=4)
    scheduler.add(small)
    assert _step(scheduler)[0].new_seqs == [small]


def test_preempted_with_a_token_under_way_waits_until_it_is_known() -> None:
    scheduler = _scheduler(num_blocks=1 + 14, max_num_seqs=3, budget=64)
    small, big = (_sequence(n, 1, num_output_tokens=4, num_prompt_tokens=size) for n, size in enumerate([4, 24]))
    for seq in (small, big):
        scheduler.add(seq)
    launched = scheduler.schedule().sampling_seqs()
    for seq in launched:
        seq.num_pending += 1
    urgent = _sequence(2, 0, num_output_tokens=2, num_prompt_tokens=38)  # both must go, and the small one fits again
    scheduler.add(urgent)
    assert scheduler.schedule().new_seqs == [urgent]
    for seq in launched:
        seq.num_pending -= 1
        seq.token_ids.append(1)
    assert scheduler.schedule().new_seqs == [small]


def test_equal_priority_never_takes_anybodys_place() -> None:
    scheduler = _scheduler(max_num_seqs=2)
    for number in range(6):
        scheduler.add(_sequence(number, 3))
    while scheduler.running or scheduler.num_waiting:
        _step(scheduler)
    assert scheduler.num_preemptions == 0


def test_when_blocks_run_out_the_worst_priority_gives_way_however_cheap_others_are() -> None:
    scheduler = _scheduler(num_blocks=1 + 7, max_num_seqs=3)
    expect_short_outputs(scheduler)
    params = SamplingParams(max_tokens=20)
    seqs = [
        Sequence(
            Request(str(number), [1] * length, params, priority=priority),
            arrival=number,
            max_model_len=100,
            eos_token_ids=frozenset([0]),
        )
        for number, (length, priority) in enumerate([(4, 0), (2, 0), (10, 1)])
    ]
    for seq in seqs:
        scheduler.add(seq)
    while not scheduler.num_preemptions:
        _step(scheduler)
    assert [seq.num_preemptions for seq in seqs] == [0, 0, 1]


@settings(max_examples=100)
@given(
    work=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 12), st.integers(1, 12), st.integers(0, 6)),
        min_size=1,
        max_size=14,
    ),
    max_num_seqs=st.integers(1, 4),
    extra_budget=st.integers(0, 6),
    num_blocks=st.integers(8, 24),
)
def test_nobody_starves_and_equals_end_in_the_order_in_which_they_could_begin(
    work: list[tuple[int, int, int, int]], max_num_seqs: int, extra_budget: int, num_blocks: int
) -> None:
    """Priority, prompt, output, steps until it comes. One seat: equals of equal work end as they came."""
    scheduler = _scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, budget=max_num_seqs + extra_budget)
    todo = [
        (wait, _sequence(number, p, num_output_tokens=o, num_prompt_tokens=i))
        for number, (p, i, o, wait) in enumerate(work)
    ]
    ended: list[Sequence] = []
    for step in range(30 + 30 * sum(i + o for _, i, o, _ in work)):
        for seq in [seq for wait, seq in todo if wait == step]:
            scheduler.add(seq)
        _, done = _step(scheduler)
        ended += done
        if max_num_seqs == 1 and scheduler.running and scheduler.waiting:
            assert scheduler.running[0].priority <= scheduler.waiting.head.priority
    assert len(ended) == len(work), "starved"
    assert scheduler.block_manager.num_used_blocks == 0
    if max_num_seqs == 1:
        for priority in range(3):
            arrived = [(wait, seq.arrival) for wait, seq in todo if seq.priority == priority]
            same = [seq.arrival for seq in ended if seq.priority == priority]
            if len({wait for wait, _ in arrived}) == 1:
                assert same == sorted(same)


@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "sampled"])
def test_preempted_for_a_priority_equals_alone(make_engine: EngineFactory, params: SamplingParams) -> None:
    prompts = [[(7 * n + k) % 90 + 3 for k in range(5 + 3 * n)] for n in range(6)]
    requests = [Request(f"r{n}", prompt, params, seed=n, priority=6 - n) for n, prompt in enumerate(prompts)]
    alone = {}
    for request in requests:
        alone |= run(make_engine(max_num_seqs=1), [request])
    for caching in (False, True):
        engine = make_engine(max_num_seqs=2, enable_prefix_caching=caching)
        tokens = {}
        for request in requests:  # each better than all before it
            engine.add_request(request)
            tokens |= {done.request_id: done.token_ids for _ in range(3) for done in engine.step()}
        tokens |= {name: done.token_ids for name, done in run_out(engine).items()}
        assert engine.stats().num_preemptions > 0
        assert tokens == {name: done.token_ids for name, done in alone.items()}


def run_out(engine):
    """What is left, by id."""
    left = {}
    while engine.has_unfinished():
        left |= {done.request_id: done for done in engine.step()}
    return left


def test_the_most_urgent_request_ends_first(make_engine: EngineFactory) -> None:
    base = [Request(f"r{n}", [5, 6, 7, 8 + n], GREEDY) for n in range(4)]
    engine = make_engine(max_num_seqs=1)
    for request in base:
        engine.add_request(request)
    engine.step()
    engine.add_request(replace(base[0], request_id="urgent", priority=-1))
    assert next(iter(run_out(engine))) == "urgent"
