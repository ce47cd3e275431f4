"""States of prefixes: sequences with a fake memory of rows, so that one wrong state anywhere shows up."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.batching import ContinuousBatching
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.scheduling.state_cache import MIN_GAIN, MIN_OF_MANY, StateCache
from bulkrun.request import Request, SamplingParams

BLOCK_SIZE = 8
SHARED = list(range(100, 100 + 2 * MIN_GAIN))
NEXT_TOKEN = 7  # of everybody


class Rows:
    """What the rows of states hold: of each the tokens that it has seen."""

    def __init__(self) -> None:
        self.seen: dict[int, list[int]] = {}

    def run(self, batch: ScheduledBatch) -> None:
        for copy in batch.state_loads:
            self.seen[copy.target] = self.seen[copy.source]
        for seq, start, count in zip(batch.seqs, batch.starts, batch.num_scheduled_tokens, strict=True):
            known = [*seq.token_ids, *[NEXT_TOKEN] * seq.num_pending]
            assert start == 0 or self.seen[seq.row] == known[:start], "it goes on from another's state"
            self.seen[seq.row] = known[: start + count]
            if seq.prompt_logprobs is not None and start + count >= seq.num_prompt_tokens:
                seq.prompt_logprobs += [None] * (seq.num_prompt_tokens - len(seq.prompt_logprobs))
        targets = [copy.target for copy in batch.state_saves]
        assert len({*targets}) == len(targets) and not {*targets} & {seq.row for seq in batch.seqs}
        for copy in batch.state_saves:
            self.seen[copy.target] = self.seen[copy.source]


def make_scheduler(
    *, num_states: int = 3, num_blocks: int = 200, max_num_seqs: int = 4, budget: int = 300
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
        policy=ContinuousBatching(max_num_seqs),
        num_kept_states=num_states,
    )


def make_sequence(number: int, prompt: list[int], priority: int = 0, prompt_logprobs: int | None = None) -> Sequence:
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=prompt_logprobs)
    return Sequence(
        Request(str(number), tuple(prompt), sampling, priority=priority), arrival=number, max_model_len=10_000
    )


def run(scheduler: Scheduler, prompts: SequenceOf[list[int]], rows: Rows | None = None) -> list[Sequence]:
    """All of them to their ends; returns the sequences. `rows`: as earlier runs left them."""
    seqs, rows = [make_sequence(number, prompt) for number, prompt in enumerate(prompts)], rows or Rows()
    for seq in seqs:
        scheduler.add(seq)
    for _ in range(50 + 20 * sum(map(len, prompts))):
        if not (scheduler.running or scheduler.num_waiting):
            return seqs
        step(scheduler, rows)
    raise AssertionError("starved")


def step(scheduler: Scheduler, rows: Rows) -> ScheduledBatch:
    batch = scheduler.schedule()
    rows.run(batch)
    due = batch.sampling_seqs()
    for seq in due:
        seq.token_ids.append(NEXT_TOKEN)
    scheduler.finish([seq for seq in due if seq.num_tokens == seq.max_num_tokens])
    return batch


tails = st.lists(st.integers(1, 3), min_size=1, max_size=12)
# groups of prompts within groups, beginning with as many tokens as are worth it, or fewer
prompts = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(0, 70), tails).map(
    lambda drawn: [*SHARED, *[10 + drawn[0]] * drawn[1], *[20] * drawn[2], *drawn[3]]
)


@settings(max_examples=150, deadline=None)
@given(
    asked=st.lists(prompts, min_size=1, max_size=14),
    is_sorted=st.booleans(),
    num_states=st.integers(0, 4),
    num_blocks=st.integers(26, 200),
    budget=st.integers(4, 300),
)
def test_whoever_begins_behind_a_prefix_has_its_state(
    asked: list[list[int]], is_sorted: bool, num_states: int, num_blocks: int, budget: int
) -> None:
    scheduler = make_scheduler(num_states=num_states, num_blocks=num_blocks, budget=budget)
    run(scheduler, sorted(asked) if is_sorted else asked)
    assert scheduler.block_manager.num_used_blocks == 0


class Ahead:
    """Steps that are planned before the tokens of the one before are known."""

    def __init__(self, scheduler: Scheduler, rows: Rows) -> None:
        self.scheduler, self.rows = scheduler, rows
        self.under_way: list[Sequence] = []

    def step(self) -> None:
        batch = self.scheduler.schedule()
        self.rows.run(batch)
        due, self.under_way = self.under_way, batch.sampling_seqs()
        for seq in self.under_way:
            seq.num_pending += 1
        for seq in due:
            seq.num_pending -= 1
            if not seq.has_ended:
                seq.token_ids.append(NEXT_TOKEN)
        self.scheduler.finish([seq for seq in due if not seq.has_ended and len(seq.token_ids) == seq.max_num_tokens])


arrivals = st.lists(st.tuples(prompts, st.integers(0, 2), st.booleans(), st.integers(0, 3)), min_size=1, max_size=14)


@settings(max_examples=150, deadline=None)
@given(arrivals, st.integers(1, 4), st.integers(27, 200), st.integers(4, 300), st.sets(st.integers(0, 60), max_size=3))
def test_nothing_is_lost_whoever_comes_and_goes(
    arrivals: list[tuple[list[int], int, bool, int]], num_states: int, num_blocks: int, budget: int, leaving: set[int]
) -> None:
    """Sequences of several priorities, some that may not begin behind a prefix, and some that leave half-way."""
    scheduler = make_scheduler(num_states=num_states, num_blocks=num_blocks, budget=budget)
    ahead, states, left = Ahead(scheduler, Rows()), scheduler._states, list(enumerate(arrivals))
    for number in range(5000):
        while left and number >= left[0][1][3] * left[0][0]:
            arrival, (prompt, priority, wants_logprobs, _) = left.pop(0)
            scheduler.add(make_sequence(arrival, prompt, priority, 1 if wants_logprobs else None))
        if number in leaving and scheduler.running:
            scheduler.abort({scheduler.running[0].request.request_id})
        ahead.step()
        rows = [*states._unused, *states._kept.values(), *states._saved.values()]
        assert sorted(rows) == list(range(4, 4 + num_states))
        if not (left or scheduler.running or scheduler.num_waiting):
            assert scheduler.block_manager.num_used_blocks == 0
            return
    raise AssertionError("starved")


def test_siblings_compute_a_shared_prefix_once_and_wait_for_it() -> None:
    scheduler, rows = make_scheduler(), Rows()
    for number in range(3):
        scheduler.add(make_sequence(number, [*SHARED, 1, 2, number]))
    first = step(scheduler, rows)
    assert first.num_scheduled_tokens == [len(SHARED)] and len(first.state_saves) == 1
    second = step(scheduler, rows)
    assert sorted(second.num_scheduled_tokens) == [3, 3, 3] and len(second.state_loads) == 2


def test_prefixes_within_prefixes() -> None:
    groups = [[*SHARED, *[50 + group] * MIN_GAIN] for group in range(3)]
    seqs = run(make_scheduler(num_states=2), [[*group, member] for group in groups for member in (1, 2, 3)])
    whole = len(groups[0])
    cached = [seq.num_cached_tokens for seq in seqs]  # the second group shows that the first part of the first counts
    assert cached == [0, whole, whole, 0, whole, whole, len(SHARED), whole, whole]


def test_prompts_that_are_alike_share_all_but_their_last_block() -> None:
    seqs = run(make_scheduler(), [[*SHARED, 1, 2, 3]] * 4)
    assert [seq.num_cached_tokens for seq in seqs] == [0, *[len(SHARED)] * 3]


def test_little_in_common_is_not_waited_for_unless_many_have_it() -> None:
    seqs = run(make_scheduler(), [[*SHARED[: MIN_GAIN - 1], number] for number in range(4)])
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0, MIN_GAIN - BLOCK_SIZE, MIN_GAIN - BLOCK_SIZE]
    seqs = run(make_scheduler(), [[*SHARED[: MIN_OF_MANY - 1], number] for number in range(4)])
    assert [seq.num_cached_tokens for seq in seqs] == [0] * 4


def test_nobody_waits_for_one_that_left() -> None:
    scheduler, rows = make_scheduler(budget=8), Rows()
    for number in range(2):
        scheduler.add(make_sequence(number, [*SHARED, number]))
    step(scheduler, rows)
    assert step(scheduler, rows).new_seqs == [], "the second waits for the first"
    scheduler.abort({"0"})
    assert [seq.arrival for seq in step(scheduler, rows).new_seqs] == [1]


@pytest.mark.parametrize("forget", ["forget_states", "restart"])
def test_nothing_is_loaded_from_what_is_forgotten(forget: str) -> None:
    scheduler = make_scheduler()
    run(scheduler, [[*SHARED, 1], [*SHARED, 2]])
    if forget == "restart":
        scheduler.restart(BlockManager(200, BLOCK_SIZE), 300)
    else:
        scheduler.forget_states()
    assert [seq.num_cached_tokens for seq in run(scheduler, [[*SHARED, 3]])] == [0]


def test_the_state_that_was_not_used_for_longest_goes_first() -> None:
    prefixes = [[9 + number] * MIN_GAIN for number in range(3)]
    scheduler, rows = make_scheduler(num_states=2), Rows()
    run(scheduler, [[*prefix, member] for prefix in prefixes[:2] for member in (1, 2)], rows)
    run(scheduler, [[*prefixes[0], 3]], rows)
    run(scheduler, [[*prefixes[2], member] for member in (1, 2)], rows)
    cached = [run(scheduler, [[*prefixes[number], 4]], rows)[0].num_cached_tokens for number in (0, 2, 1)]
    assert cached == [MIN_GAIN, MIN_GAIN, 0]


def test_a_state_that_two_bring_in_one_step_takes_one_row() -> None:
    states = StateCache(range(5, 7))
    seqs = [make_sequence(number, [*SHARED, number]) for number in range(3)]
    for seq in seqs[:2]:
        states.plan_saves(seq, seqs[2], 0, BLOCK_SIZE)
    rows = [states.save(seq, BLOCK_SIZE) for seq in seqs[:2]]
    states.begin_step()
    other = make_sequence(4, [9] * 2 * MIN_GAIN)
    states.plan_saves(other, make_sequence(5, [9] * 2 * MIN_GAIN), 0, BLOCK_SIZE)
    assert [*rows, states.save(other, BLOCK_SIZE)] == [5, None, 6]


def test_a_state_that_is_saved_again_takes_its_own_row() -> None:
    states, rows = StateCache(range(5, 7)), []
    for number in range(3):
        seq, sibling = (make_sequence(one, [*SHARED, one]) for one in (number, 9))
        states.plan_saves(seq, sibling, 0, BLOCK_SIZE)
        (seq.num_computed_tokens,) = seq.saves_state_at
        rows.append(states.save(seq, BLOCK_SIZE))
        states.begin_step()
    assert len({*rows}) == 1
