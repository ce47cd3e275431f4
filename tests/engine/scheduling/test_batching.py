"""The three batching policies: who joins when, and that the tokens are the same."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.engine.scheduling.batching import batching_policy
from bulkrun.engine.scheduling.block_manager import BlockManager
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.scheduler import Scheduler
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.errors import UsageError
from bulkrun.request import Request, SamplingParams
from bulkrun.settings import Batching
from tests.engine.conftest import EngineFactory, generate_with_transformers, run

POLICIES: tuple[Batching, ...] = ("continuous", "static", "dynamic")


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _scheduler(
    batching: Batching,
    *,
    max_num_seqs: int = 3,
    budget: int = 100,
    num_blocks: int = 200,
    window_s: float = 0.0,
    clock: Clock | None = None,
) -> Scheduler:
    return Scheduler(
        BlockManager(num_blocks, 4),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
        policy=batching_policy(batching, max_num_seqs, window_s, clock or Clock()),
    )


def _sequence(number: int, num_output_tokens: int, *, num_prompt_tokens: int = 3, arrived_at: float = 0.0) -> Sequence:
    request = Request(
        str(number), [1] * num_prompt_tokens, SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
    )
    return Sequence(request, arrival=number, arrived_at=arrived_at, max_model_len=1000)


def _step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    ended = []
    for index, seq in enumerate(batch.seqs):
        if batch.samples(index):
            seq.token_ids.append(1)
            if seq.num_tokens >= seq.max_num_tokens:
                ended.append(seq)
    scheduler.finish(ended)
    return batch


def _widths(scheduler: Scheduler, lengths: list[int]) -> list[list[int]]:
    """Which sequences each step computed."""
    for number, length in enumerate(lengths):
        scheduler.add(_sequence(number, length))
    steps = []
    while scheduler.running or scheduler.num_waiting:
        steps.append(sorted(seq.arrival for seq in _step(scheduler).seqs))
    return steps


def test_continuous_refills_a_seat_in_the_step_after_its_sequence_ended() -> None:
    assert _widths(_scheduler("continuous"), [1, 3, 2, 2, 1]) == [[0, 1, 2], [1, 2, 3], [1, 3, 4]]


def test_static_runs_a_batch_to_its_last_sequence_before_the_next_begins() -> None:
    assert _widths(_scheduler("static"), [1, 3, 2, 2, 1]) == [[0, 1, 2], [1, 2], [1], [3, 4], [3]]


def test_dynamic_with_a_full_queue_is_static() -> None:
    assert _widths(_scheduler("dynamic", window_s=9.0), [1, 3, 2, 2, 1, 1]) == _widths(
        _scheduler("static"), [1, 3, 2, 2, 1, 1]
    )


def test_a_static_batch_whose_prompts_are_more_than_a_step_computes_fills_over_several() -> None:
    scheduler = _scheduler("static", budget=5)
    for number in range(5):
        scheduler.add(_sequence(number, 1 if number == 0 else 9, num_prompt_tokens=4))
    seen = [sorted(seq.arrival for seq in _step(scheduler).seqs) for _ in range(6)]
    assert seen[0] == [0, 1]
    assert max(number for step in seen for number in step) == 2, "an ended sequence's seat was filled again"


def test_latecomers_do_not_join_a_static_batch_that_has_empty_seats() -> None:
    scheduler = _scheduler("static")
    scheduler.add(_sequence(0, 3))
    _step(scheduler)
    scheduler.add(_sequence(1, 1))
    assert [[seq.arrival for seq in _step(scheduler).seqs] for _ in range(3)] == [[0], [0], [1]]


def test_nobody_of_a_static_batch_gives_way_to_a_better_priority_which_could_not_join_it() -> None:
    scheduler = _scheduler("static", max_num_seqs=1)
    scheduler.add(_sequence(0, 3))
    _step(scheduler)
    urgent = _sequence(1, 1)
    urgent.priority = -1
    scheduler.add(urgent)
    assert [[seq.arrival for seq in _step(scheduler).seqs] for _ in range(3)] == [[0], [0], [1]]


def test_dynamic_waits_for_a_full_batch_but_no_longer_than_the_window() -> None:
    clock = Clock()
    scheduler = _scheduler("dynamic", window_s=2.0, clock=clock)
    scheduler.add(_sequence(0, 2, arrived_at=0.0))
    clock.now = 1.0
    scheduler.add(_sequence(1, 1, arrived_at=1.0))
    assert _step(scheduler).seqs == []
    clock.now = 1.9
    assert _step(scheduler).seqs == []
    clock.now = 2.0
    assert [seq.arrival for seq in _step(scheduler).seqs] == [0, 1]
    for number in (2, 3, 4):
        scheduler.add(_sequence(number, 1, arrived_at=2.0))
    assert [seq.arrival for seq in _step(scheduler).seqs] == [0]  # a batch runs
    assert [seq.arrival for seq in _step(scheduler).seqs] == [2, 3, 4]  # full: no waiting


@settings(max_examples=60)
@given(
    batching=st.sampled_from(POLICIES),
    work=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 15)), min_size=1, max_size=15),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.integers(0, 6),
    num_blocks=st.integers(9, 30),
)
def test_everybody_finishes_under_every_policy_and_little_memory(
    batching: Batching, work: list[tuple[int, int]], max_num_seqs: int, extra_budget: int, num_blocks: int
) -> None:
    scheduler = _scheduler(
        batching, max_num_seqs=max_num_seqs, budget=max_num_seqs + extra_budget, num_blocks=num_blocks
    )
    seqs = [_sequence(number, o, num_prompt_tokens=i) for number, (i, o) in enumerate(work)]
    for seq in seqs:
        scheduler.add(seq)
    bound = 20 + 20 * sum(i + o for i, o in work)
    for _ in range(bound):
        if not (scheduler.running or scheduler.num_waiting):
            break
        _step(scheduler)
        assert len(scheduler.running) <= max_num_seqs
    assert [seq.num_output_tokens for seq in seqs] == [o for _, o in work]
    assert scheduler.block_manager.num_used_blocks == 0


@pytest.mark.parametrize("batching", POLICIES)
def test_greedy_tokens_equal_transformers_under_each_policy(make_engine: EngineFactory, batching: Batching) -> None:
    prompts = [[7, 8, 9], [5] * 11, [3, 4], list(range(10, 40)), [9] * 6]
    engine = make_engine(batching=batching, batching_window_s=0.01, max_num_seqs=2, max_num_batched_tokens=9)
    requests = [
        Request(str(i), prompt, SamplingParams(max_tokens=4 + 5 * (i % 3), temperature=0.0, ignore_eos=True))
        for i, prompt in enumerate(prompts)
    ]
    for request_id, completion in run(engine, requests).items():
        request = requests[int(request_id)]
        expected = generate_with_transformers(
            "llama", request.prompt_token_ids, request.sampling.max_tokens, eos_token_id=None
        )
        assert list(completion.token_ids) == expected


def test_an_idle_engine_changes_its_policy(make_engine: EngineFactory) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    engine = make_engine(batching="static", max_num_seqs=2)
    run(engine, [Request("before", [5], params)])
    engine.change_batching("continuous")
    for name in ("early", "late"):
        engine.add_request(Request(name, [5], params))
        engine.step()
    assert engine.stats().num_running == 2  # a static batch would have been closed
    assert engine.config.batching == "continuous"


def test_settings_that_cannot_work_are_refused_by_name(make_engine: EngineFactory) -> None:
    with pytest.raises(UsageError, match=r"engine\.batching: 'magic' is not one of continuous, static, dynamic"):
        make_engine(batching="magic")
    with pytest.raises(UsageError, match=r"engine\.batching_window_s: -1\.0 is not a number of seconds"):
        make_engine(batching="dynamic", batching_window_s=-1.0)
