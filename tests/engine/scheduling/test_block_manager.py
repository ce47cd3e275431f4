"""The block manager against a small model of what it must be: sets of owners and a list in eviction order."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bulkrun.blocks import NULL_BLOCK
from bulkrun.engine.scheduling.block_manager import ROOT_HASH, BlockManager, hash_block


def _hash(n: int) -> bytes:
    return hash_block(ROOT_HASH, array("i", [n]))


def test_null_block_is_never_handed_out() -> None:
    manager = BlockManager(num_blocks=5, block_size=4)
    assert NULL_BLOCK not in manager.allocate(4)
    assert manager.num_free_blocks == 0


def test_allocating_more_than_is_free_is_a_programming_error() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    with pytest.raises(AssertionError, match="3 blocks wanted, 2 are free"):
        manager.allocate(3)


def test_double_release_is_a_programming_error() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    blocks = manager.allocate(1)
    manager.release(blocks)
    with pytest.raises(AssertionError, match="more often than it was taken"):
        manager.release(blocks)


def test_hash_depends_on_tokens_order_and_everything_before() -> None:
    first = hash_block(ROOT_HASH, array("i", [1, 2]))
    assert first == hash_block(ROOT_HASH, array("i", [1, 2]))
    assert first != hash_block(ROOT_HASH, array("i", [2, 1]))
    assert hash_block(first, array("i", [3, 4])) != hash_block(ROOT_HASH, array("i", [3, 4]))


def test_match_stops_at_the_first_hole_in_the_chain() -> None:
    manager = BlockManager(num_blocks=8, block_size=4)
    blocks = manager.allocate(3)
    for n in (0, 2):
        manager.register(blocks[n], _hash(n))
    assert manager.match_prefix([_hash(0), _hash(1), _hash(2)]) == blocks[:1]


def test_released_prefix_is_found_again_and_acquired_from_the_free_list() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    blocks = manager.allocate(2)
    manager.register(blocks[0], _hash(0))
    manager.release(blocks)
    assert manager.num_free_among(blocks) == 2
    manager.acquire(manager.match_prefix([_hash(0)]))
    assert manager.num_free_blocks == 2
    assert manager.ref_count(blocks[0]) == 1


def test_blocks_without_a_hash_go_first_and_ends_of_prefixes_before_their_starts() -> None:
    manager = BlockManager(num_blocks=6, block_size=4)
    old, plain = manager.allocate(3), manager.allocate(2)
    for n, block_id in enumerate(old):
        manager.register(block_id, _hash(n))
    manager.release(old)
    manager.release(plain)
    assert sorted(manager.allocate(2)) == sorted(plain)
    assert manager.allocate(3) == [old[2], old[1], old[0]]
    assert manager.match_prefix([_hash(0)]) == []


def test_second_block_with_a_known_hash_stays_private() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    one, two = manager.allocate(2)
    manager.register(one, _hash(0))
    manager.register(two, _hash(0))
    manager.release([two])
    assert manager.match_prefix([_hash(0)]) == [one]


def test_forgotten_block_is_not_matched_any_more() -> None:
    manager = BlockManager(num_blocks=4, block_size=4)
    blocks = manager.allocate(1)
    manager.register(blocks[0], _hash(0))
    manager.forget(blocks)
    assert manager.match_prefix([_hash(0)]) == []


def test_tail_is_found_while_it_is_owned_and_after_until_its_block_is_handed_out_again() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    (tail,) = manager.allocate(1)
    manager.register_tail(tail, _hash(0))
    assert manager.match_tail(_hash(0)) == tail
    manager.release([tail])
    assert manager.match_tail(_hash(0)) == tail
    manager.allocate(1)  # the other block: a tail is worth more than nothing
    assert manager.match_tail(_hash(0)) == tail
    manager.allocate(1)
    assert manager.match_tail(_hash(0)) is None


def test_free_tail_is_taken_over_and_what_stood_behind_it_is_forgotten() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    (block_id,) = manager.allocate(1)
    manager.register_tail(block_id, _hash(0))
    manager.register(block_id, _hash(1))
    manager.release([block_id])
    manager.take_over_tail(block_id)
    assert (manager.ref_count(block_id), manager.num_free_blocks) == (1, 1)
    assert manager.match_prefix([_hash(1)]) == []
    assert manager.match_tail(_hash(0)) == block_id


def test_tail_with_an_owner_cannot_be_taken_over() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    (block_id,) = manager.allocate(1)
    manager.register_tail(block_id, _hash(0))
    with pytest.raises(AssertionError, match="copy it"):
        manager.take_over_tail(block_id)


def test_forgotten_block_is_no_tail_any_more() -> None:
    manager = BlockManager(num_blocks=3, block_size=4)
    (block_id,) = manager.allocate(1)
    manager.register_tail(block_id, _hash(0))
    manager.forget([block_id])
    assert manager.match_tail(_hash(0)) is None


class BlockManagerMachine(RuleBasedStateMachine):
    """Random owners take, share and give back block tables; a plain model predicts every answer."""

    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.manager = BlockManager(num_blocks, block_size=4)
        self.tables: list[list[int]] = []
        self.free = [b for b in range(num_blocks) if b != NULL_BLOCK]
        self.cached: dict[bytes, int] = {}
        self.tails: dict[bytes, int] = {}

    @rule(count=st.integers(0, 5))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        expected, self.free = self.free[:count], self.free[count:]
        self.cached = {h: b for h, b in self.cached.items() if b not in expected}
        self.tails = {h: b for h, b in self.tails.items() if b not in expected}
        assert self.manager.allocate(count) == expected
        self.tables.append(expected)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), number=st.integers(0, 9))
    def register(self, data: st.DataObject, number: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if not table:
            return
        block_id = data.draw(st.sampled_from(table))
        if _hash(number) not in self.cached and block_id not in self.cached.values():
            self.cached[_hash(number)] = block_id
        self.manager.register(block_id, _hash(number))

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), number=st.integers(0, 3))
    def register_tail(self, data: st.DataObject, number: int) -> None:
        table = data.draw(st.sampled_from(self.tables))
        if not table:
            return
        if _hash(number) not in self.tails and table[-1] not in self.tails.values():
            self.tails[_hash(number)] = table[-1]
        self.manager.register_tail(table[-1], _hash(number))

    @rule(number=st.integers(0, 3))
    def take_over_tail(self, number: int) -> None:
        block_id = self.tails.get(_hash(number))
        assert self.manager.match_tail(_hash(number)) == block_id
        if block_id is None or block_id not in self.free:
            return
        self.manager.take_over_tail(block_id)
        self.cached = {h: b for h, b in self.cached.items() if b != block_id}
        self.free.remove(block_id)
        self.tables.append([block_id])

    @rule(numbers=st.lists(st.integers(0, 9), max_size=4, unique=True))
    def share(self, numbers: list[int]) -> None:
        expected: list[int] = []
        for number in numbers:
            if _hash(number) not in self.cached:
                break
            expected.append(self.cached[_hash(number)])
        matched = self.manager.match_prefix([_hash(n) for n in numbers])
        assert matched == expected
        assert self.manager.num_free_among(matched) == len(set(matched) & set(self.free))
        self.manager.acquire(matched)
        self.free = [b for b in self.free if b not in matched]
        self.tables.append(matched)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.manager.release(table)
        for block_id in reversed(table):
            if any(block_id in other for other in self.tables):
                continue
            is_worth_keeping = block_id in self.cached.values() or block_id in self.tails.values()
            self.free.insert(len(self.free) if is_worth_keeping else 0, block_id)

    @invariant()
    def every_block_is_free_or_owned_as_often_as_counted(self) -> None:
        if not hasattr(self, "manager"):
            return
        assert self.manager.num_free_blocks == len(self.free)
        assert self.manager.num_used_blocks == self.manager.num_blocks - 1 - len(self.free)
        for block_id in range(1, self.manager.num_blocks):
            owners = sum(table.count(block_id) for table in self.tables)
            assert self.manager.ref_count(block_id) == owners
            assert (owners == 0) == (block_id in self.free)
        for number in range(len(self.tables) + 1):
            leaving, staying = self.tables[:number], self.tables[number:]
            only_theirs = {block for table in leaving for block in table} - {b for table in staying for b in table}
            assert self.manager.num_freed_by(leaving) == len(only_theirs)


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=150, stateful_step_count=30)
