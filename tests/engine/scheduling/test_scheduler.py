"""The scheduler with a fake model: budgets, order, preemption, sharing, and that everyone gets to the end."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from bulkrun.engine.scheduling.admission import MIN_SAMPLES
from bulkrun.engine.scheduling.batching import ContinuousBatching
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import expect_short_outputs, preempted

BLOCK_SIZE = 4


def _scheduler(num_blocks: int = 65, max_num_seqs: int = 8, budget: int = 16, caching: bool = True) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, BLOCK_SIZE),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        policy=ContinuousBatching(max_num_seqs),
    )


def _sequence(number: int, prompt: list[int], max_tokens: int, *, can_stop: bool = True) -> Sequence:
    request = Request(str(number), prompt, SamplingParams(max_tokens=max_tokens))
    eos_token_ids = frozenset([0]) if can_stop else frozenset()
    return Sequence(request, arrival=number, max_model_len=10_000, eos_token_ids=eos_token_ids)


def _fake_model(batch: ScheduledBatch, scheduler: Scheduler, length_of: Callable[[Sequence], int]) -> list[Sequence]:
    """Gives every sequence that is due its next token, and ends those that reached their length."""
    ended = []
    for index, seq in enumerate(batch.seqs):
        if batch.samples(index):
            seq.token_ids.append(1 + (seq.arrival * 7 + seq.num_tokens) % 50)
            if seq.num_output_tokens >= length_of(seq):
                ended.append(seq)
    scheduler.finish(ended)
    return ended


def _check_step(batch: ScheduledBatch, scheduler: Scheduler) -> None:
    """What holds for every step, whatever happened before."""
    assert 0 < batch.num_tokens <= scheduler.max_num_batched_tokens
    assert len(set(map(id, batch.seqs))) == len(batch.seqs)
    assert all(count == 1 for count in batch.num_scheduled_tokens[: batch.num_decode_seqs])
    rows = [seq.row for seq in scheduler.running]
    assert None not in rows
    assert len(set(rows)) == len(rows)
    owners: dict[int, int] = {}
    for seq in scheduler.running:
        assert len(seq.block_table) * BLOCK_SIZE >= seq.num_tokens
        for block_id in seq.block_table:
            owners[block_id] = owners.get(block_id, 0) + 1
    manager = scheduler.block_manager
    assert all(manager.ref_count(b) == owners.get(b, 0) for b in range(1, manager.num_blocks))
    for seq, start, count in zip(batch.seqs, batch.starts, batch.num_scheduled_tokens, strict=True):
        assert count >= 1
        assert start + count == seq.num_computed_tokens <= seq.num_tokens


class PagedMemory:
    """What a cache would hold: each slot the tokens up to its own, so that one wrong block anywhere shows up."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}

    def run(self, batch: ScheduledBatch, block_size: int = BLOCK_SIZE) -> None:
        """Store the step's tokens, copy, and read what every sequence of the step attends to."""
        expected = []
        written: set[tuple[int, int]] = set()
        for seq, start, count in zip(batch.seqs, batch.starts, batch.num_scheduled_tokens, strict=True):
            for position in range(start + count):
                slot = seq.block_table[position // block_size], position % block_size
                content = hash(tuple(seq.token_ids[: position + 1]))
                expected.append((slot, content))
                if position >= start:
                    assert slot not in written, "two sequences write to one slot"
                    written.add(slot)
                    self.slots[slot] = content
        targets = {copy.target for copy in batch.kv_copies}
        assert len(targets) == len(batch.kv_copies)
        assert not targets & {copy.source for copy in batch.kv_copies}, "a copy of a copy of the same step"
        for copy in batch.kv_copies:
            for offset in range(copy.num_tokens):
                assert (copy.target, offset) not in written
                self.slots[copy.target, offset] = self.slots[copy.source, offset]
        assert all(self.slots[slot] == content for slot, content in expected), "somebody reads what is not its own"


def _check_run(
    scheduler: Scheduler, seqs: list[Sequence], length_of: Callable[[Sequence], int]
) -> list[ScheduledBatch]:
    """Runs to the end and checks every step; fails when it takes longer than any fair order could."""
    for seq in seqs:
        scheduler.add(seq)
    ended: list[Sequence] = []
    batches = []
    memory = PagedMemory()
    bound = 50 + 20 * sum(seq.num_prompt_tokens + length_of(seq) for seq in seqs)
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        _check_step(batch, scheduler)
        memory.run(batch)
        batches.append(batch)
        ended += _fake_model(batch, scheduler, length_of)
        assert len(batches) <= bound, "starved"
    assert sorted(seq.arrival for seq in ended) == sorted(seq.arrival for seq in seqs)
    assert scheduler.block_manager.num_used_blocks == 0
    assert len(scheduler._free_rows) == len(set(scheduler._free_rows))
    return batches


@settings(max_examples=150)
@given(
    work=st.lists(
        st.tuples(
            st.lists(st.integers(1, 3), min_size=1, max_size=23),  # few token ids: prefixes collide often
            st.integers(1, 25),  # the output's length
            st.integers(0, 30),  # how far max_tokens is above it
        ),
        min_size=1,
        max_size=20,
    ),
    num_blocks=st.integers(14, 40),
    max_num_seqs=st.integers(1, 7),
    extra_budget=st.integers(0, 9),
    caching=st.booleans(),
    can_stop=st.booleans(),
)
def test_every_sequence_finishes_and_all_blocks_come_back(
    work, num_blocks, max_num_seqs, extra_budget, caching, can_stop
) -> None:
    scheduler = _scheduler(num_blocks, max_num_seqs, max_num_seqs + extra_budget, caching)
    lengths = [length for _, length, _ in work]
    seqs = [_sequence(i, p, length + slack, can_stop=can_stop) for i, (p, length, slack) in enumerate(work)]
    _check_run(scheduler, seqs, lambda seq: lengths[seq.arrival])


def test_idle_scheduler_gives_an_empty_batch() -> None:
    assert _scheduler().schedule().seqs == []


def test_long_prompt_is_chunked_and_does_not_stop_the_decoders() -> None:
    scheduler = _scheduler(budget=10)
    short = _sequence(0, [1, 2, 3], 8)
    long = _sequence(1, list(range(1, 40)), 2)
    batches = _check_run(scheduler, [short, long], lambda seq: seq.request.sampling.max_tokens)
    shares = [dict(zip([s.arrival for s in b.seqs], b.num_scheduled_tokens, strict=True)) for b in batches]
    assert shares[0] == {0: 3, 1: 7}
    assert [share[1] for share in shares[:6]] == [7, 9, 9, 9, 5, 1]
    assert all(share[0] == 1 for share in shares[1:8])


def test_decoders_come_first_in_the_batch() -> None:
    scheduler = _scheduler(budget=12)
    scheduler.add(_sequence(0, [1, 2, 3], 5))
    scheduler.add(_sequence(1, [4] * 20, 5))
    _fake_model(scheduler.schedule(), scheduler, lambda _: 5)
    scheduler.add(_sequence(2, [5, 5, 5], 5))
    batch = scheduler.schedule()
    assert [seq.arrival for seq in batch.seqs] == [0, 1, 2][: len(batch.seqs)]
    assert batch.num_scheduled_tokens[0] == 1
    assert batch.num_decode_seqs == 1


def test_what_is_left_of_a_step_goes_to_those_behind_one_after_the_other() -> None:
    scheduler = _scheduler(max_num_seqs=2, budget=6, caching=False)
    seqs = [_sequence(number, [1, 2, 3], 9) for number in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    assert scheduler.schedule().num_scheduled_tokens == [3, 3]
    for seq in seqs:
        seq.token_ids.extend([5] * 4)  # forced ones, all but the first
    assert scheduler.schedule().num_scheduled_tokens == [4, 2]


def test_waiting_sequences_are_admitted_in_order_of_arrival() -> None:
    scheduler = _scheduler(max_num_seqs=2)
    for number in range(5):
        scheduler.add(_sequence(number, [number + 1] * 3, 4))
    assert [seq.arrival for seq in scheduler.schedule().seqs] == [0, 1]


def test_sibling_of_the_same_step_shares_the_prefix_that_is_being_computed() -> None:
    scheduler = _scheduler(budget=64)
    prefix = list(range(1, 13))
    for number in range(3):
        scheduler.add(_sequence(number, [*prefix, 90 + number], 2))
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == [13, 1, 1]
    assert len({tuple(seq.block_table[:3]) for seq in batch.seqs}) == 1
    assert [seq.num_cached_tokens for seq in batch.seqs] == [0, 12, 12]


def test_fully_cached_prompt_still_computes_its_last_token() -> None:
    scheduler = _scheduler(budget=64)
    for number in range(2):
        scheduler.add(_sequence(number, list(range(1, 9)), 2))
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == [8, 1]
    (copy,) = batch.kv_copies
    assert (copy.source, copy.target) == (batch.seqs[0].block_table[1], batch.seqs[1].block_table[1])
    assert copy.num_tokens == 3
    assert copy.source != copy.target


@pytest.mark.parametrize("block_size", [1, 2, 4, 16, 36, 37, 64])
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(8, 64), (8, 9), (3, 1000), (1, 5)])
def test_samples_compute_their_prompt_once_whatever_the_block_size(
    block_size: int, max_num_seqs: int, budget: int
) -> None:
    scheduler = Scheduler(
        BlockManager(1 + 8 * 64, block_size),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=True,
        policy=ContinuousBatching(max_num_seqs),
    )
    memory, seqs = PagedMemory(), [_sequence(number, list(range(1, 38)), 6) for number in range(8)]
    for seq in seqs:
        scheduler.add(seq)
    num_computed = 0
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        memory.run(batch, block_size)
        num_computed += sum(
            max(0, min(start + count, 37) - start)
            for start, count in zip(batch.starts, batch.num_scheduled_tokens, strict=True)
        )
        _fake_model(batch, scheduler, lambda _: 6)
    assert num_computed == 37 + 7
    assert [seq.num_cached_tokens for seq in seqs] == [0] + [36] * 7
    assert scheduler.block_manager.num_used_blocks == 0


def test_tail_is_not_copied_from_a_sequence_that_has_not_computed_it_yet() -> None:
    scheduler = _scheduler(max_num_seqs=2, budget=7)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    scheduler.add(_sequence(0, prompt, 2))
    assert scheduler.schedule().num_scheduled_tokens == [7]  # all but the last token: the tail is there
    scheduler.add(_sequence(1, prompt, 2))
    batch = scheduler.schedule()
    assert (batch.num_scheduled_tokens, len(batch.kv_copies)) == ([1, 1], 1)
    slow = _scheduler(max_num_seqs=2, budget=6)
    for number in range(2):
        slow.add(_sequence(number, prompt, 2))
    assert slow.schedule().num_scheduled_tokens == [6]
    batch = slow.schedule()
    assert (batch.num_scheduled_tokens, len(batch.kv_copies)) == ([2, 1], 1)


def test_tail_that_was_left_half_computed_is_not_offered() -> None:
    scheduler = _scheduler(max_num_seqs=2, budget=6)
    prompt, memory = [1, 2, 3, 4, 5, 6, 7, 8], PagedMemory()
    scheduler.add(_sequence(0, prompt, 2))
    memory.run(scheduler.schedule())  # 6 of the 7 tokens that a tail is whole with
    scheduler.abort({"0"})
    scheduler.add(_sequence(1, prompt, 2))
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == [4]
    memory.run(batch)


def test_tail_without_the_blocks_before_it_is_of_no_use() -> None:
    scheduler = _scheduler(budget=64)
    prompt, memory = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10], PagedMemory()
    first = _sequence(0, prompt, 2)
    scheduler.add(first)
    memory.run(scheduler.schedule())
    scheduler.block_manager.forget(first.block_table[:1])
    scheduler.add(_sequence(1, prompt, 2))
    batch = scheduler.schedule()
    memory.run(batch)
    assert batch.num_scheduled_tokens == [1, 10]


def test_tail_is_offered_again_when_it_is_computed_again() -> None:
    scheduler = _scheduler(budget=64)
    prompt, first = [1, 2, 3, 4, 5, 6], _sequence(0, [1, 2, 3, 4, 5, 6], 4)
    scheduler.add(first)
    blocks = scheduler.schedule().seqs[0].block_table
    scheduler._preempt(first)
    scheduler.block_manager.forget(blocks)
    for number in range(1, 3):
        scheduler.add(_sequence(number, prompt, 4))
    assert scheduler.schedule().num_scheduled_tokens == [6, 1, 1]


def test_prompts_that_differ_in_their_last_token_share_the_rest() -> None:
    scheduler = _scheduler(budget=64)
    for number in range(3):
        scheduler.add(_sequence(number, [1, 2, 3, 4, 5, 6, 90 + number], 2))
    assert scheduler.schedule().num_scheduled_tokens == [7, 1, 1]


def test_free_tail_is_taken_over_without_a_copy_even_after_output_was_written_behind_it() -> None:
    scheduler = _scheduler(budget=64)
    first, second = (_sequence(number, [1, 2, 3, 4, 5, 6], 9) for number in range(2))
    memory = PagedMemory()
    scheduler.add(first)
    tables = []
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        tables.append(list(first.block_table))
        memory.run(batch)
        _fake_model(batch, scheduler, lambda _: 9)
    scheduler.add(second)
    batch = scheduler.schedule()
    memory.run(batch)
    assert (batch.num_scheduled_tokens, batch.kv_copies) == ([1], [])
    assert second.block_table[:2] == tables[-1][:2]


def test_sequence_that_wants_its_prompt_logits_reads_no_cache_but_fills_it() -> None:
    scheduler = _scheduler(budget=64)
    prompt = [1, 2, 3, 4, 5, 6]
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    for number in range(2):
        scheduler.add(Sequence(Request(str(number), prompt, params), arrival=number, max_model_len=99))
    scheduler.add(_sequence(2, prompt, 2))
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == [6, 6, 1]


def test_only_computed_blocks_of_a_chunked_prompt_are_shared() -> None:
    scheduler = _scheduler(budget=10)
    scheduler.add(_sequence(0, list(range(1, 31)), 2))
    assert scheduler.schedule().num_scheduled_tokens == [10]
    assert scheduler.schedule().num_scheduled_tokens == [10]
    scheduler.add(_sequence(1, list(range(1, 31)), 2))
    batch = scheduler.schedule()
    assert batch.num_scheduled_tokens == [10]  # sequence 0 takes the whole budget
    _fake_model(batch, scheduler, lambda _: 9)
    assert scheduler.schedule().num_scheduled_tokens == [1, 1]  # 29 of 30 were cached


def test_caching_off_shares_nothing() -> None:
    scheduler = _scheduler(budget=64, caching=False)
    for number in range(2):
        scheduler.add(_sequence(number, list(range(1, 14)), 2))
    assert scheduler.schedule().num_scheduled_tokens == [13, 13]


def test_preemption_takes_the_cheapest_but_never_the_oldest() -> None:
    scheduler = _scheduler(num_blocks=10, budget=64, caching=False)  # 9 blocks of 4
    expect_short_outputs(scheduler)
    seqs = [
        _sequence(0, [1] * 4, 30),
        _sequence(1, [2] * 15, 30),
        _sequence(2, [3] * 7, 30),
    ]
    for seq in seqs:
        scheduler.add(seq)
    while not scheduler.num_preemptions:
        _fake_model(scheduler.schedule(), scheduler, lambda _: 30)
    assert [seq.num_preemptions for seq in seqs] == [0, 0, 1]
    assert preempted(scheduler) == [seqs[2]]
    assert seqs[2].num_output_tokens > 0
    assert seqs[2].row is None


def test_after_a_preemption_nothing_is_admitted_until_something_ends() -> None:
    scheduler = _scheduler(num_blocks=10, budget=64, caching=False)
    expect_short_outputs(scheduler)
    seqs = [_sequence(0, [1] * 8, 12), _sequence(1, [2] * 8, 20), _sequence(2, [3] * 2, 2)]
    for seq in seqs:
        scheduler.add(seq)
    ended: list[Sequence] = []
    while not scheduler.num_preemptions:
        ended = _fake_model(scheduler.schedule(), scheduler, lambda seq: seq.request.sampling.max_tokens)
    (victim,) = preempted(scheduler)
    while not ended:
        batch = scheduler.schedule()
        assert not batch.new_seqs
        ended = _fake_model(batch, scheduler, lambda seq: seq.request.sampling.max_tokens)
    assert scheduler.schedule().new_seqs[:1] == [victim]


def test_what_did_not_fit_is_tried_again_as_soon_as_something_ends() -> None:
    scheduler = _scheduler(num_blocks=1 + 12, budget=64, caching=False)
    short, long, waits = (
        _sequence(number, [1] * prompt, output, can_stop=False)
        for number, (prompt, output) in enumerate([(8, 3), (8, 8), (22, 4)])
    )
    for seq in (short, long, waits):
        scheduler.add(seq)
    while short.row is not None or not short.num_output_tokens:
        batch = scheduler.schedule()
        assert waits not in batch.new_seqs
        _fake_model(batch, scheduler, lambda seq: seq.request.sampling.max_tokens)
    assert scheduler.schedule().new_seqs == [waits]
    assert scheduler.running == [long, waits]


def test_what_did_not_fit_is_tried_again_in_another_pool_even_if_nobody_ran_there_before() -> None:
    scheduler = _scheduler(num_blocks=1 + 4, caching=False)
    first, waits = (_sequence(number, [1] * 8, 8, can_stop=False) for number in range(2))
    scheduler.add(first)
    scheduler.add(waits)
    assert scheduler.schedule().new_seqs == [first]
    scheduler.restart(BlockManager(1 + 4, BLOCK_SIZE), 16)
    scheduler.drop([first])
    assert scheduler.schedule().new_seqs == [waits]


def test_cached_blocks_that_nobody_holds_are_free_ones_which_it_takes() -> None:
    scheduler = _scheduler(num_blocks=1 + 6, budget=64)
    before, busy = _sequence(0, list(range(1, 9)), 1), _sequence(1, [50] * 10, 2)
    scheduler.add(before)
    _fake_model(scheduler.schedule(), scheduler, lambda _: 1)
    needs_five = _sequence(2, [*range(1, 9), *range(60, 69)], 1)
    scheduler.add(busy)
    scheduler.add(needs_five)
    for new_seqs in ([busy], [], [needs_five]):
        batch = scheduler.schedule()
        assert batch.new_seqs == new_seqs
        _fake_model(batch, scheduler, lambda seq: seq.request.sampling.max_tokens)
    assert needs_five.num_cached_tokens == 8


class _CountsLookups(BlockManager):
    num_lookups = 0

    def match_prefix(self, hashes: SequenceOf[bytes]) -> list[int]:
        self.num_lookups += 1
        return super().match_prefix(hashes)


def test_what_did_not_fit_costs_nothing_until_something_ends() -> None:
    manager = _CountsLookups(1 + 12, BLOCK_SIZE)
    scheduler = Scheduler(
        manager,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        policy=ContinuousBatching(4),
    )
    for number in range(2):
        scheduler.add(_sequence(number, [1 + number] * 8, 30, can_stop=False))
    lookups = []
    for _ in range(10):
        _fake_model(scheduler.schedule(), scheduler, lambda _: 30)
        lookups.append(manager.num_lookups)
    assert lookups[1:] == lookups[:1] * 9


def test_who_fits_only_without_half_empty_blocks_is_not_let_in() -> None:
    """At their peak the two hold 10 tokens in 4 blocks, where 3 are."""
    scheduler = _scheduler(num_blocks=1 + 3, caching=False)
    seqs = [_sequence(0, [1, 1], 5, can_stop=False), _sequence(1, [2, 2], 3, can_stop=False)]
    batches = _check_run(scheduler, seqs, lambda seq: seq.request.sampling.max_tokens)
    assert scheduler.num_preemptions == 0
    assert max(len(batch.seqs) for batch in batches) == 1


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 50])
def test_a_pool_for_so_many_full_sequences_runs_so_many_at_once(num_seqs: int) -> None:
    blocks_per_seq = 5
    scheduler = _scheduler(1 + num_seqs * blocks_per_seq, num_seqs, budget=400)
    for number in range(2 * num_seqs):
        prompt = [100 * number + n for n in range(3)]
        scheduler.add(_sequence(number, prompt, blocks_per_seq * BLOCK_SIZE - 3, can_stop=False))
    running = []
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        running.append(len(batch.seqs))
        _fake_model(batch, scheduler, lambda seq: seq.max_num_tokens - seq.num_prompt_tokens)
    assert set(running) == {num_seqs} and scheduler.num_preemptions == 0


def test_cached_tokens_of_a_completion_are_those_of_the_first_admission() -> None:
    scheduler = _scheduler(max_num_seqs=1, budget=64)
    seq = _sequence(0, [1] * 9, 20)
    scheduler.add(seq)
    _fake_model(scheduler.schedule(), scheduler, lambda _: 20)
    params = SamplingParams(max_tokens=1)
    scheduler.add(Sequence(Request("urgent", [2], params, priority=-1), arrival=1, max_model_len=99))
    while not seq.num_preemptions or seq.row is None:
        _fake_model(scheduler.schedule(), scheduler, lambda seq: seq.request.sampling.max_tokens)
    assert seq.num_shared_tokens == 8  # it finds its own blocks again
    assert seq.num_cached_tokens == 0


def test_of_a_resumed_sequence_only_the_prompt_counts_as_cached() -> None:
    scheduler = _scheduler()
    seqs = [_sequence(number, [1] * 5, 20) for number in range(2)]
    for seq in seqs:
        seq.token_ids.extend([7] * 8)
        scheduler.add(seq)
    scheduler.schedule()
    assert [(seq.num_shared_tokens, seq.num_cached_tokens) for seq in seqs] == [(0, 0), (12, 5)]


def test_who_computes_anew_after_a_restart_was_given_nothing_by_the_cache() -> None:
    scheduler = _scheduler()
    seqs = [_sequence(number, [1] * 9, 3) for number in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    scheduler.schedule()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 8]
    scheduler.restart(BlockManager(65, BLOCK_SIZE), 16)
    scheduler.schedule()
    assert [seq.num_cached_tokens for seq in seqs] == [0, 0]


def test_nobody_gives_way_to_one_whose_last_token_is_on_its_way() -> None:
    scheduler = _scheduler(caching=False)
    seqs = [_sequence(number, [1] * BLOCK_SIZE, 1) for number in range(2)]
    for seq in seqs:
        scheduler.add(seq)
    scheduler.schedule()
    for seq in seqs:
        seq.num_pending = 1  # it would stand in a block of its own
    scheduler.block_manager.allocate(scheduler.block_manager.num_free_blocks)
    assert scheduler.schedule().seqs == []
    assert scheduler.num_preemptions == 0


def test_after_a_preemption_lengths_are_not_guessed_for_a_while() -> None:
    """Short outputs are known, then come long ones: too many are let in, but only once."""
    scheduler = _scheduler(num_blocks=1 + 20, max_num_seqs=16, budget=64, caching=False)
    seqs = [_sequence(number, [1, 2, 3], 33) for number in range(40)]
    for seq in seqs:
        scheduler.add(seq)
    let_in_before: list[Sequence] = []
    while scheduler.running or scheduler.num_waiting:
        batch = scheduler.schedule()
        if not scheduler.num_preemptions:
            let_in_before += batch.new_seqs
        _fake_model(batch, scheduler, lambda seq: 2 if seq.arrival < 20 else 33)
    victims = [seq for seq in seqs if seq.num_preemptions]
    assert victims
    assert all(seq in let_in_before and seq.num_preemptions == 1 for seq in victims)


def test_admission_reserves_max_tokens_until_lengths_are_known() -> None:
    scheduler = _scheduler(num_blocks=1 + 20, max_num_seqs=16, budget=64, caching=False)
    for number in range(60):
        scheduler.add(_sequence(number, [1, 2, 3], 33))  # 36 tokens are 9 blocks: two fit into 20
    batch = scheduler.schedule()
    assert len(batch.seqs) == 2
    _fake_model(batch, scheduler, lambda _: 2)
    width = 0
    while scheduler.running or scheduler.num_waiting:
        _fake_model(scheduler.schedule(), scheduler, lambda _: 2)  # but outputs are short
        width = max(width, len(scheduler.running))
    assert width > 8


@pytest.mark.parametrize("caching", [True, False])
def test_abort_frees_running_waiting_and_preempted(caching: bool) -> None:
    scheduler = _scheduler(max_num_seqs=2, caching=caching)
    for number in range(4):
        scheduler.add(_sequence(number, [number + 1] * 5, 4))
    scheduler.schedule()
    dropped = scheduler.abort({"0", "3"})
    assert sorted(seq.arrival for seq in dropped) == [0, 3]
    assert [seq.arrival for seq in scheduler.running] == [1]
    assert [seq.arrival for seq in scheduler.waiting] == [2]
    assert scheduler.block_manager.num_used_blocks == 2


def test_how_long_dropped_sequences_got_says_nothing() -> None:
    scheduler, dropped = _scheduler(), [_sequence(number, [1], 9) for number in range(MIN_SAMPLES)]
    for seq in dropped:
        seq.token_ids.append(1)
    scheduler.drop(dropped)
    assert scheduler._lengths.remaining_tokens(_sequence(99, [1], 9)) == 9


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, step and are dropped in any order; at the end everybody left must finish."""

    @initialize(
        num_blocks=st.integers(9, 24), max_num_seqs=st.integers(1, 6), caching=st.booleans(), dares=st.booleans()
    )
    def make(self, num_blocks: int, max_num_seqs: int, caching: bool, dares: bool) -> None:
        self.scheduler = _scheduler(num_blocks, max_num_seqs, max_num_seqs + 3, caching)
        if dares:
            expect_short_outputs(self.scheduler)
        self.memory = PagedMemory()
        self.lengths: list[int] = []
        self.unfinished: set[int] = set()

    @rule(
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=15),
        length=st.integers(1, 16),
    )
    def add(self, prompt: list[int], length: int) -> None:
        number = len(self.lengths)
        self.lengths.append(length)
        self.unfinished.add(number)
        self.scheduler.add(_sequence(number, prompt, 16))

    @rule()
    def step(self) -> None:
        batch = self.scheduler.schedule()
        if self.unfinished:
            _check_step(batch, self.scheduler)
        self.memory.run(batch)
        ended = _fake_model(batch, self.scheduler, lambda seq: self.lengths[seq.arrival])
        self.unfinished -= {seq.arrival for seq in ended}

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        numbers = data.draw(st.sets(st.integers(0, max(0, len(self.lengths) - 1)), max_size=3))
        dropped = {seq.arrival for seq in self.scheduler.abort({str(number) for number in numbers})}
        assert dropped == numbers & self.unfinished
        self.unfinished -= dropped

    def teardown(self) -> None:
        for _ in range(60 * (1 + len(self.lengths))):
            if hasattr(self, "scheduler") and self.unfinished:
                self.step()
        assert not getattr(self, "unfinished", None), "starved"
        if hasattr(self, "scheduler"):
            assert self.scheduler.block_manager.num_used_blocks == 0
            assert not self.scheduler.running
            assert not self.scheduler.num_waiting


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=100, stateful_step_count=40)
