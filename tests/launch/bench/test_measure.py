"""The clock beside an engine: what is counted, with engines and times that are known."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.errors import UsageError
from bulkrun.launch.bench.measure import Measured, check_lengths, run_workload, warm_up
from bulkrun.launch.bench.workload import Work, heavy_tailed_work
from bulkrun.request import Completion, EngineStats, Request
from tests.models.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLMEngine]:
    path: Path = save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")

    def make(**settings: object) -> LLMEngine:
        defaults: dict[str, object] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 8 * 2**20}
        return LLMEngine.from_model_dir(path, **(defaults | settings))

    return make


WORK = [Work([5 + n, 6, 7], length) for n, length in enumerate([1, 4, 2, 3, 1])]


@pytest.mark.parametrize(
    ("batching", "ahead", "steps", "held"),
    [
        ("continuous", False, [3, 3, 3, 2], 11),
        ("continuous", True, [3, 2, 2, 3, 1], 11),
        ("static", False, [3, 2, 1, 1, 2, 1, 1], 18),
        ("static", True, [3, 2, 1, 1, 2, 1, 1], 18),
    ],
)
def test_seats_are_those_of_the_policys_own_arithmetic(
    make_engine: Callable[..., LLMEngine], batching: str, ahead: bool, steps: list[int], held: int
) -> None:
    """Outputs of 1, 4, 2, 3, 1 tokens on three seats.

    Continuous: 0 1 2 | 1 2 3 | 1 3 4 | 1 3; with steps launched ahead of their tokens a seat is free one step later:
    0 1 2 | 1 2 | 1 3 | 1 3 4 | 3. Static: 0 1 2 | 1 2 | 1 | 1, then 3 4 | 3 | 3: four steps of three seats and three
    of two.
    """
    engine = make_engine(batching=batching, async_scheduling=ahead, max_num_seqs=3)
    measured = run_workload(engine, WORK, holds_seats=batching != "continuous")
    assert [width for _, width in measured.widths] == steps
    assert (measured.num_busy, measured.num_held) == (11, held)
    assert (measured.input_tokens, measured.output_tokens, len(measured.latencies_s)) == (15, 11, 5)
    assert max(measured.latencies_s) <= measured.wall_s


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("batching", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("sizes", [{}, {"max_num_batched_tokens": 16}, {"kv_cache_memory_bytes": 64 * 1024}])
def test_seats_and_positions_are_those_of_the_schedulers_batches(
    make_engine: Callable[..., LLMEngine], batching: str, ahead: bool, sizes: dict[str, int]
) -> None:
    """Counted by sequence, here: whoever was let in since the scheduler last had nobody holds a seat."""
    engine = make_engine(
        **{"batching": batching, "async_scheduling": ahead, "max_num_seqs": 4, "enable_prefix_caching": False} | sizes
    )
    schedule, widths, positions, held, seated = engine.scheduler.schedule, [], 0, 0, set[str]()

    def counted_schedule() -> ScheduledBatch:
        nonlocal positions, held, seated
        seated = seated if engine.scheduler.running else set()
        batch = schedule()
        seated |= {seq.request.request_id for seq in batch.new_seqs}
        if batch.seqs:
            widths.append(len(batch.seqs))
            positions += sum(batch.num_scheduled_tokens)
            held += len(batch.seqs) if batching == "continuous" else len(seated)
        return batch

    engine.scheduler.schedule = counted_schedule  # type: ignore[method-assign]
    work = heavy_tailed_work(18, vocab_size=90, max_model_len=60)
    measured = run_workload(engine, work, holds_seats=batching != "continuous")
    assert [width for _, width in measured.widths] == widths
    assert (measured.num_busy, measured.num_held, measured.num_positions) == (sum(widths), held, positions)
    needed = sum(len(one.prompt_token_ids) + one.num_output_tokens - 1 for one in work)
    assert positions == needed or (engine.stats().num_preemptions > 0 and positions > needed)


def test_requests_are_added_when_they_arrive_and_latency_counts_from_then(
    make_engine: Callable[..., LLMEngine],
) -> None:
    engine = make_engine()
    run_workload(engine, WORK)
    measured = run_workload(engine, WORK[:2], [0.0, 0.4])
    assert measured.wall_s >= 0.4
    assert measured.widths[0][1] == 1
    assert all(latency < measured.wall_s for latency in measured.latencies_s)


class FakeEngine:
    """A second a step on a clock of its own; a request ends in the step that gives it its last token."""

    max_model_len = 100

    def __init__(self) -> None:
        self.now, self.left = 1000.0, dict[str, int]()
        self.num_steps = 0

    def add_request(self, request: Request) -> None:
        self.left[request.request_id] = request.sampling.max_tokens

    def has_unfinished(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Completion]:
        self.now, self.num_steps = self.now + 1, self.num_steps + 1
        self.left = {name: left - 1 for name, left in self.left.items()}
        ended = [name for name, left in self.left.items() if not left]
        return [Completion(name, (5,), "length") for name in ended if self.left.pop(name) == 0]

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.left), num_steps=self.num_steps)

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "for ever"
        self.now += seconds


def test_a_latency_is_from_the_arrival_to_the_end_however_long_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals at 0, 1.5 and 9: the second is let in by the step that begins at 2, the third by nobody before 9. Then
    all at once."""
    engine = FakeEngine()
    monkeypatch.setattr(time, "perf_counter", lambda: engine.now)
    monkeypatch.setattr(time, "sleep", engine.sleep)
    work = [Work([5], length) for length in (3, 4, 2)]
    measured = run_workload(engine, work, [0.0, 1.5, 9.0])  # type: ignore[arg-type]
    assert measured.latencies_s == [3.0, 6 - 1.5, 11 - 9.0]
    assert measured.wall_s == 11
    at_once = run_workload(engine, work)  # type: ignore[arg-type]
    assert (at_once.latencies_s, at_once.wall_s) == ([2.0, 3.0, 4.0], 4)


def test_what_warmed_an_engine_up_spares_the_measured_run_nothing(make_engine: Callable[..., LLMEngine]) -> None:
    """Not a block of its prompts is in the prefix cache then."""
    engine, work = make_engine(enable_prefix_caching=True), [Work(list(range(5, 85)), 2), Work(list(range(9, 89)), 3)]
    warm_up(engine, work)
    assert run_workload(engine, work).num_positions == 80 + 1 + 80 + 2


def test_a_terminal_is_shown_what_runs_and_a_log_is_not(
    make_engine: Callable[..., LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, log, terminal = make_engine(), io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    for stderr in (log, terminal):
        monkeypatch.setattr(sys, "stderr", stderr)
        run_workload(engine, WORK, what="round 2 of 3, static")
    assert log.getvalue() == ""
    assert "round 2 of 3, static:   0%" in terminal.getvalue()
    assert "0/5" in terminal.getvalue()
    assert terminal.getvalue().rstrip(" ").endswith("\r"), "nothing is left of it"


@pytest.mark.parametrize(
    ("count", "half", "most"), [(1, 1.0, 1.0), (2, 1.0, 2.0), (3, 2.0, 3.0), (100, 50.0, 99.0), (101, 51.0, 100.0)]
)
def test_percentiles_are_latencies_of_the_nearest_rank(count: int, half: float, most: float) -> None:
    measured = Measured(latencies_s=[float(n) for n in range(count, 0, -1)])
    assert (measured.latency_s(0.5), measured.latency_s(0.99)) == (half, most)


def test_a_request_that_would_be_cut_short_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"request 1: 9 \+ 4 tokens are above max_model_len 12"):
        check_lengths([Work([1] * 8, 4), Work([1] * 9, 4)], 12)
