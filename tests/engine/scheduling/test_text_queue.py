"""Who shares a step: whoever's turn it is, beside those of the most similar lengths, and each exactly once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bulkrun.engine.scheduling.text_queue import TextQueue
from bulkrun.request import Request

WAITING = st.lists(st.tuples(st.integers(1, 50), st.integers(-1, 1)), min_size=1, max_size=40)


def queue_of(waiting: list[tuple[int, int]]) -> TextQueue:
    queue = TextQueue()
    for number, (length, priority) in enumerate(waiting):
        queue.add(Request(str(number), [1] * length, priority=priority))
    return queue


@given(WAITING, st.integers(1, 8), st.integers(1, 80))
def test_every_step_has_the_one_whose_turn_it_is_and_keeps_its_sizes(
    waiting: list[tuple[int, int]], max_num_seqs: int, max_num_tokens: int
) -> None:
    queue, left = queue_of(waiting), dict(enumerate(waiting))
    while left:
        taken = queue.take(max_num_seqs, max_num_tokens)
        lens = [len(request.prompt_token_ids) for request in taken]
        numbers = [int(request.request_id) for request in taken]
        assert lens == sorted(lens)
        assert min(left, key=lambda number: (left[number][1], number)) in numbers
        assert len(taken) <= max_num_seqs
        assert len(taken) == 1 or sum(lens) <= max_num_tokens
        assert queue.taken_ids == {request.request_id for request in taken}
        queue.remove(queue.taken_ids)
        for number in numbers:
            del left[number]
    assert len(queue) == 0
    assert queue.take(max_num_seqs, max_num_tokens) == []


def test_similar_lengths_go_together() -> None:
    queue = queue_of([(10, 0), (50, 0), (11, 0), (49, 0), (9, 0), (48, 0)])
    steps = [[request.request_id for request in queue.take(3, 1000)] for _ in range(2)]
    assert steps == [["4", "0", "2"], ["5", "3", "1"]]


def test_a_step_may_be_full_to_its_last_token() -> None:
    queue = queue_of([(10, 0), (10, 0), (12, 0)])
    assert [request.request_id for request in queue.take(3, 32)] == ["0", "1", "2"]


def test_whoever_is_put_back_does_not_come_before_those_who_came_earlier() -> None:
    queue = queue_of([(10, 0), (50, 0), (10, 0)])
    assert [request.request_id for request in queue.take(2, 1000)] == ["0", "2"]
    queue.put_back()
    assert [request.request_id for _ in range(3) for request in queue.take(1, 1000)] == ["0", "1", "2"]


def test_worse_priorities_fill_what_better_ones_leave() -> None:
    queue = queue_of([(10, 1), (10, 0), (30, 0), (10, 1)])
    assert [request.request_id for request in queue.take(3, 1000)] == ["1", "0", "2"]


@given(WAITING, st.integers(1, 8))
def test_those_that_are_put_back_wait_where_they_did(waiting: list[tuple[int, int]], max_num_seqs: int) -> None:
    queue = queue_of(waiting)
    first = queue.take(max_num_seqs, 100)
    queue.take(max_num_seqs, 100)
    queue.put_back()
    assert queue.num_waiting == len(waiting)
    assert queue.take(max_num_seqs, 100) == first
