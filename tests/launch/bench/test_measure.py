"""The clock beside an engine: what is counted, with engines and times that are known."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.errors import UsageError
from bulkrun.launch.bench.batching import timeline
from bulkrun.launch.bench.measure import Measured, check_lengths, run_workload
from bulkrun.launch.bench.workload import Work
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
    ("batching", "steps", "held"),
    [
        ("continuous", [3, 3, 3, 2], 11),
        ("static", [3, 2, 1, 1, 2, 1, 1], 18),
    ],
)
def test_seats_are_those_of_the_policys_own_arithmetic(
    make_engine: Callable[..., LLMEngine], batching: str, steps: list[int], held: int
) -> None:
    """Outputs of 1, 4, 2, 3, 1 tokens on three seats.

    Continuous: 0 1 2 | 1 2 3 | 1 3 4 | 1 3. Static: 0 1 2 | 1 2 | 1 | 1, then 3 4 | 3 | 3: four steps of three seats
    and three of two.
    """
    measured = run_workload(make_engine(batching=batching, max_num_seqs=3), WORK, holds_seats=batching != "continuous")
    assert [width for _, width in measured.widths] == steps
    assert (measured.num_busy, measured.num_held) == (11, held)
    assert (measured.input_tokens, measured.output_tokens, len(measured.latencies_s)) == (15, 11, 5)
    assert max(measured.latencies_s) <= measured.wall_s


def test_requests_are_added_when_they_arrive_and_latency_counts_from_then(
    make_engine: Callable[..., LLMEngine],
) -> None:
    engine = make_engine()
    run_workload(engine, WORK)
    measured = run_workload(engine, WORK[:2], [0.0, 0.4])
    assert measured.wall_s >= 0.4
    assert measured.widths[0][1] == 1
    assert all(latency < measured.wall_s for latency in measured.latencies_s)


def test_percentiles_are_latencies_that_were_there() -> None:
    measured = Measured(latencies_s=[float(n) for n in range(100, 0, -1)])
    assert (measured.latency_s(0.5), measured.latency_s(0.99)) == (51.0, 100.0)


def test_a_request_that_would_be_cut_short_is_refused_before_anything_runs() -> None:
    with pytest.raises(UsageError, match=r"request 1: 9 \+ 4 tokens are above max_model_len 12"):
        check_lengths([Work([1] * 8, 4), Work([1] * 9, 4)], 12)


def test_the_timeline_spreads_each_step_over_its_own_time() -> None:
    bins = timeline([(30.0, 2), (60.0, 1)], 60.0, 4)
    assert bins == [0.5] * 30 + [0.25] * 30
    assert timeline([(30.0, 4)], 60.0, 4) == [1.0] * 30 + [0.0] * 30
