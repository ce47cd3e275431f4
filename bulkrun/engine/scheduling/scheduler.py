"""Decides which sequence computes how many tokens in the next step. Pure Python, no tensors.

There are no phases. Running sequences come first (one token each, or the rest of a chunked prompt), then waiting ones
are admitted while tokens, rows and blocks last. All blocks a sequence needs for the tokens it has are taken at
admission, so only growth can run out of blocks; then the cheapest sequence is preempted and later recomputed.

A waiting sequence takes the places of running ones of worse priority when there is no room for it otherwise.

Nothing starves among equals: sequences wait in order of priority and arrival, nothing overtakes the head of the queue,
and the first running sequence in that order is never preempted for another's growth. So the first unfinished one gets
in, stays and ends.
"""

from __future__ import annotations

from bisect import bisect_left

from bulkrun.engine.scheduling.admission import Growths, OutputLengthEstimator
from bulkrun.engine.scheduling.batching import BatchingPolicy
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.pool_room import PoolRoom
from bulkrun.engine.scheduling.prefix_cache import CachedPrefix, PrefixCache
from bulkrun.engine.scheduling.scheduled_batch import KVCopy, ScheduledBatch, StateCopy
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.scheduling.state_cache import StateCache
from bulkrun.engine.scheduling.waiting import WaitingQueue


class Scheduler:
    """Waiting and running sequences, their rows, and the blocks they own; `policy` says who may join when."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        enable_prefix_caching: bool,
        policy: BatchingPolicy,
        num_kept_states: int | None = None,
    ) -> None:
        """`num_kept_states`: those of prefixes, where sequences of the model have states; None: they have none."""
        assert max_num_batched_tokens >= max_num_seqs, "every running sequence must get a token in every step"
        self.block_manager = block_manager
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.policy = policy
        self._enable_prefix_caching = enable_prefix_caching
        self._num_rows, self._num_kept_states = max_num_seqs, num_kept_states
        self._states, self._prefix_cache = self._empty_caches()
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._lengths = OutputLengthEstimator()
        self._room = PoolRoom(block_manager, self._lengths)
        self._refused: Sequence | None = None  # did not fit when it was the head, and nobody has left the pool since

    def add(self, seq: Sequence) -> None:
        """Queue a sequence behind all others of its priority and better ones."""
        self.waiting.add(seq)

    @property
    def num_waiting(self) -> int:
        """Sequences without a row: new and preempted ones."""
        return len(self.waiting)

    def schedule(self) -> ScheduledBatch:
        """The next step's work; the sequences count as computed that far from here on. Empty when idle."""
        batch = ScheduledBatch()
        if self._states is not None:
            self._states.begin_step()
        self._make_room_for_growth()
        num_seats = self.policy.num_seats(len(self.running), self.waiting)
        if num_seats:
            self._make_room_for_priority()
        self._schedule_running(batch)
        self._admit_waiting(batch, num_seats)
        return batch

    def finish(self, seqs: list[Sequence], *, observe: bool = True) -> None:
        """Take ended sequences out, wherever they are, and free what they hold; `observe`: they ended by themselves.

        A step under way may still write to what is freed: whoever gets it next is computed by a later step, and the
        device does one step after the other.
        """
        self.waiting.remove([seq for seq in seqs if seq.row is None])
        for seq in seqs:
            seq.has_ended = True
            if seq.row is not None:
                self._release(seq)
            if observe:
                self._lengths.observe(seq.num_output_tokens)
        self.running = [seq for seq in self.running if not seq.has_ended]

    def abort(self, request_ids: set[str]) -> list[Sequence]:
        """Drop the sequences of these requests; returns those dropped."""
        everyone = [*self.running, *self.waiting]
        dropped = [seq for seq in everyone if seq.request.request_id in request_ids]
        self.drop(dropped)
        return dropped

    def drop(self, seqs: list[Sequence]) -> None:
        """Take sequences out; says nothing about how long outputs are."""
        self.finish(seqs, observe=False)

    def restart(self, block_manager: BlockManager, max_num_batched_tokens: int) -> None:
        """Preempt everyone, even where scheduling was broken off half-way, and go on with another, empty pool."""
        self.block_manager = block_manager
        self._states, self._prefix_cache = self._empty_caches()
        self._room = PoolRoom(block_manager, self._lengths)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting.remove(self.running)
        for seq in self.running:
            seq.leave_pool()
            seq.num_cached_tokens = 0
            self._count_preemption(seq)
        self.running = []
        self._free_rows = list(range(self._num_rows - 1, -1, -1))
        self._refused = None

    def forget_states(self) -> None:
        """Let nobody begin with a state that is kept: one of them may not be numbers."""
        self._states, self._prefix_cache = self._empty_caches()

    def _empty_caches(self) -> tuple[StateCache | None, PrefixCache]:
        """Of the block manager that is there, whose own cache stays."""
        states = None
        if self._num_kept_states is not None:
            states = StateCache(range(self._num_rows, self._num_rows + self._num_kept_states))
        return states, PrefixCache(self.block_manager, is_enabled=self._enable_prefix_caching, states=states)

    def _make_room_for_growth(self) -> None:
        """Preempt until every running sequence that enters a new block can have one."""
        size = self.block_manager.block_size
        while len(self.running) > self.block_manager.num_free_blocks:  # else there is one for everyone
            num_short = sum(
                seq.num_tokens > len(seq.block_table) * size and not seq.ends_when_known for seq in self.running
            )
            if num_short <= self.block_manager.num_free_blocks:
                return
            assert len(self.running) > 1, "one sequence alone always fits: EngineConfig sees to it"
            first = min(self.running, key=lambda seq: seq.order)
            self._preempt(min((seq for seq in self.running if seq is not first), key=_cost_of_preemption))
            self._lengths.observe_preemption()  # or others would come in, and be thrown out in their turn

    def _make_room_for_priority(self) -> None:
        """Preempt those of worse priority than the head of the queue until it fits, if that is enough for it."""
        if not self.waiting or not self.running:
            return
        head = self.waiting.head
        worse = sorted((seq for seq in self.running if seq.priority > head.priority), key=_cost_of_preemption)
        if not worse or not self._may_fit_without(worse, head):
            return
        # what surely has to go is found by bisection, for only once a victim has left is the answer exact
        num_surely = bisect_left(range(len(worse)), True, key=lambda n: self._may_fit_without(worse[:n], head))
        for index, victim in enumerate(worse):
            if index >= num_surely and self._free_rows and self._fits(head):
                return
            self._preempt(victim)

    def _may_fit_without(self, leaving: list[Sequence], seq: Sequence) -> bool:
        return self._room.may_fit_without(leaving, seq, self._prefix_cache.find(seq).blocks, self.running)

    def _fits(self, seq: Sequence) -> bool:
        return self._room.fits(seq, self._prefix_cache.find(seq).blocks, self._room.growths(self.running))

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        self._count_preemption(seq)
        self.running.remove(seq)

    def _count_preemption(self, seq: Sequence) -> None:
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.add(seq)

    def _release(self, seq: Sequence) -> None:
        self.block_manager.release(seq.block_table)
        self._free_rows.append(seq.running_row)
        seq.leave_pool()
        self._refused = None

    def _schedule_running(self, batch: ScheduledBatch) -> None:
        """One token for every sequence that is one behind, then what is left for chunked prompts and forced tokens.

        A sequence whose last token is on its way has nothing to compute any more; no other grew by more than a block.
        """
        size = self.block_manager.block_size
        behind = []
        for seq in self.running:
            num_tokens = seq.num_tokens
            if seq.ends_when_known:
                continue
            if num_tokens > len(seq.block_table) * size:
                self._add_blocks(batch, seq, self.block_manager.allocate(1))
            if num_tokens - seq.num_computed_tokens > 1:
                behind.append(seq)
            else:
                self._append(batch, seq, 1)
        batch.num_decode_seqs = len(batch.seqs)
        budget = self.max_num_batched_tokens - len(self.running)  # beyond one token for each
        for seq in behind:
            count = min(seq.num_uncomputed_tokens, 1 + budget)
            budget -= count - 1
            self._append(batch, seq, count)

    def _admit_waiting(self, batch: ScheduledBatch, num_seats: int) -> None:
        """Let sequences in, in order, while there are seats and tokens left and the head of the queue fits."""
        budget = self.max_num_batched_tokens - batch.num_tokens
        growths: Growths | None = None  # of who runs, once somebody may be let in
        while budget > 0 and len(batch.new_seqs) < num_seats and self._free_rows and self.waiting:
            seq = self.waiting.head
            if seq is self._refused or seq.num_pending:  # pending: preempted while its next token is computed
                break
            if self._prefix_cache.is_worth_a_wait(seq):
                break
            cached = self._prefix_cache.find(seq)
            if growths is None:
                growths = self._room.growths(self.running)
            if not self._room.fits(seq, cached.blocks, growths):
                self._refused = seq
                break
            self._start(batch, seq, cached)
            growths.add(self._room.growth(seq))
            if self._states is not None:
                next_seq = self.waiting.head if self.waiting else None
                self._states.plan_saves(seq, next_seq, cached.num_known, self.block_manager.block_size)
            count = min(seq.num_uncomputed_tokens, budget)
            budget -= count
            self._append(batch, seq, count)
        self.policy.let_in(len(batch.new_seqs), out_of_tokens=budget == 0)

    def _start(self, batch: ScheduledBatch, seq: Sequence, cached: CachedPrefix) -> None:
        """Give the head of the queue its row and blocks."""
        assert not seq.num_pending, "its new row would lack the tokens that a step under way brings"
        manager = self.block_manager
        self.running.append(self.waiting.head)
        self.waiting.pop()
        seq.row = self._free_rows.pop()
        batch.new_seqs.append(seq)
        manager.acquire(cached.blocks)
        self._add_blocks(batch, seq, cached.blocks)
        seq.num_registered_blocks = len(cached.blocks)
        seq.num_shared_tokens = seq.num_computed_tokens = len(cached.blocks) * manager.block_size
        if cached.tail_block is not None:
            self._have_tail(batch, seq, cached.tail_block)
        if self._states is not None and cached.state_row is not None:
            self._states.use(cached.state_row)
            batch.state_loads.append(StateCopy(cached.state_row, seq.row))
        missing = manager.num_blocks_of(seq.num_tokens) - len(seq.block_table)
        self._add_blocks(batch, seq, manager.allocate(missing))
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)

    def _have_tail(self, batch: ScheduledBatch, seq: Sequence, tail_block: int) -> None:
        """Give the sequence the end of its prompt in a block of its own: the cached one if free, else a copy.

        The copy is made when the step's KV is stored, so the block's owner may compute the tail in this very step;
        it stays an owner until the step is over.
        """
        manager = self.block_manager
        tail = seq.prompt_tail(manager.block_size)
        if manager.ref_count(tail_block):
            (block_id,) = manager.allocate(1)
            batch.kv_copies.append(KVCopy(tail_block, block_id, tail.num_tokens))
        else:
            block_id = tail_block
            manager.take_over_tail(block_id)
        self._add_blocks(batch, seq, [block_id])
        seq.num_computed_tokens += tail.num_tokens

    def _add_blocks(self, batch: ScheduledBatch, seq: Sequence, block_ids: list[int]) -> None:
        row, first = seq.running_row, len(seq.block_table)
        seq.block_table += block_ids
        batch.block_table_updates += [(row, first + i, block_id) for i, block_id in enumerate(block_ids)]

    def _append(self, batch: ScheduledBatch, seq: Sequence, count: int) -> None:
        """Schedule `count` tokens."""
        batch.append(seq, count)
        seq.num_computed_tokens += count
        self._prefix_cache.offer(seq)
        if self._states is not None and seq.num_computed_tokens in seq.saves_state_at:
            row = self._states.save(seq, self.block_manager.block_size)
            batch.state_saves += [] if row is None else [StateCopy(seq.running_row, row)]


def _cost_of_preemption(seq: Sequence) -> tuple[int, int, int]:
    """The least: of the worst priority the one with the least to recompute, the newest of equals."""
    return -seq.priority, seq.num_computed_tokens, -seq.arrival
