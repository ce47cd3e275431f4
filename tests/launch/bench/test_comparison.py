"""What runs of policies come to, against counting by hand: medians, padding by cause, speed-up by cause."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.comparison import median_run, policy_facts, position_shares, speedup, timeline
from bulkrun.launch.bench.measure import Measured, run_workload
from bulkrun.launch.bench.workload import Work, padded
from tests.models.tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def make_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLMEngine]:
    path: Path = save_tiny_model(tmp_path_factory.mktemp("llama"), "llama")

    def make(**settings: object) -> LLMEngine:
        sizes: dict[str, object] = {"kv_cache_memory_bytes": 8 * 2**20, "enable_prefix_caching": False}
        return LLMEngine.from_model_dir(path, device="cpu", dtype="float32", max_num_seqs=3, **(sizes | settings))

    return make


WORK = [Work([5, 6], 1), Work([7, 8, 9], 4), Work([5], 2), Work([6, 7], 3), Work([8], 1)]
ALL = {"needed": 9 + 11 - 5, "prompt_padding": 0, "ended_sequences": 0, "empty_seats": 0, "recomputed": 0}


def counts_of(run: Measured) -> dict[str, int]:
    shares = position_shares(run, WORK, 3)
    assert sum(shares[name] for name in ALL) == pytest.approx(1, abs=3e-4)
    return {name: round(shares[name] * shares["positions"]) for name in ALL}


@pytest.mark.parametrize("ahead", [False, True])
def test_each_position_is_needed_or_padding_of_one_cause(make_engine: Callable[..., LLMEngine], ahead: bool) -> None:
    """Three seats; batches 0 1 2 and 3 4. Prompts are 1 + 0 + 2 and 0 + 1 short of their longest, outputs 3 + 0 + 2 and
    0 + 2. Both batches run as many steps whatever is padded: 4 with all seats, 3 with one empty.
    """
    engine = make_engine(batching="static", async_scheduling=ahead)
    both, outputs, static = (
        run_workload(engine, work, holds_seats=True) for work in (padded(WORK, 3), padded(WORK, 3, prompts=False), WORK)
    )
    assert counts_of(both) == ALL | {"prompt_padding": 4, "ended_sequences": 7, "empty_seats": 3}
    assert counts_of(outputs) == ALL | {"ended_sequences": 7, "empty_seats": 3}
    assert counts_of(static) == ALL | {"ended_sequences": 7, "empty_seats": 3}
    computed = {name: position_shares(run, WORK, 3)["computed_padding"] for name, run in (("b", both), ("s", static))}
    assert computed == {"b": round(11 / 26, 4), "s": 0}
    for run in (both, outputs, static):  # 11 tokens were wanted; seats of 7 steps, of which 3 were nobody's
        facts = policy_facts([run], WORK, 3)
        assert (facts["padding_share"], facts["slot_use"]) == (round(7 / 18, 4), round(11 / 21, 4))
        assert facts["output_tok_s"] == round(11 / run.wall_s, 1)


def test_seats_that_are_filled_again_are_empty_at_the_end_alone(make_engine: Callable[..., LLMEngine]) -> None:
    """0 1 2 | 1 2 3 | 1 3 4 | 1 3: one seat of one step."""
    run = run_workload(make_engine(), WORK)
    assert counts_of(run) == ALL | {"empty_seats": 1}


def test_positions_computed_again_are_told_apart() -> None:
    run = Measured(widths=[(1.0, 3)] * 5, num_busy=15, num_held=15, num_positions=24, input_tokens=9, output_tokens=11)
    assert counts_of(run) == ALL | {"recomputed": 9}


def test_the_median_run_stands_for_its_rounds_and_the_others_are_the_spread() -> None:
    rounds = [
        Measured(wall_s=wall, latencies_s=[wall], widths=[(wall, 2)], num_busy=2, num_held=2, output_tokens=11)
        for wall in (3.0, 1.0, 2.0)
    ]
    assert median_run(rounds) is rounds[2]
    assert median_run(rounds[:2]) is rounds[1]
    facts = policy_facts(rounds, WORK, 3)
    assert (facts["wall_s"], facts["wall_min_s"], facts["wall_max_s"], facts["latency_p50_s"]) == (2, 1, 3, 2)


def test_percentiles_of_a_policy_are_those_that_their_names_say() -> None:
    latencies = [float(n) for n in range(1, 101)]
    run = Measured(1.0, latencies, widths=[(1.0, 1)], num_busy=1, num_held=1, output_tokens=11)
    facts = policy_facts([run], WORK, 3)
    assert (facts["latency_p50_s"], facts["latency_p99_s"]) == (50, 99)


def _runs(*walls: float, steps: int) -> list[Measured]:
    return [Measured(wall_s=wall, widths=[(wall, 1)] * steps) for wall in walls]


def test_the_factors_of_the_speedup_make_up_the_whole_and_so_do_their_shares() -> None:
    rounds = {
        "padded": _runs(24.0, 30.0, 20.0, steps=40),
        "padded_outputs": _runs(12.0, 11.0, 13.0, steps=40),
        "static": _runs(6.0, 6.0, 6.0, steps=40),
        "continuous": _runs(2.0, 2.0, 2.5, steps=10),
    }
    found = speedup(rounds)
    assert (found["total"], found["total_min"], found["total_max"]) == (12, 8, 15)
    causes = ("no_prompt_padding", "no_output_padding", "refilling")
    assert [found[name] for name in causes] == [2, 2, 3]
    assert (found["no_padding"], found["fewer_steps"], found["step_time"]) == (4, 4, 0.75)
    assert sum(found[f"share_{name}"] or 0 for name in causes) == pytest.approx(1, abs=2e-3)
    assert found["share_refilling"] == pytest.approx(math.log(3) / math.log(12), abs=1e-3)


def test_there_are_no_shares_where_a_part_slowed_it_down() -> None:
    rounds = {"padded": 4.0, "padded_outputs": 5.0, "static": 3.0, "continuous": 2.0}
    found = speedup({name: _runs(wall, steps=1) for name, wall in rounds.items()})
    assert found["total"] == 2 and found["share_refilling"] is found["share_no_padding"] is None
    nothing_gained = speedup({name: _runs(2.0, steps=1) for name in rounds})
    assert nothing_gained["total"] == 1 and nothing_gained["share_refilling"] is None
    no_gain_by_prompts = speedup({name: _runs(wall, steps=1) for name, wall in (rounds | {"padded": 5.0}).items()})
    assert no_gain_by_prompts["share_no_prompt_padding"] == 0 and no_gain_by_prompts["share_refilling"]


def test_the_timeline_spreads_each_step_over_its_own_time() -> None:
    bins = timeline([(30.0, 2), (60.0, 1)], 60.0, 4)
    assert bins == [0.5] * 30 + [0.25] * 30
    assert timeline([(30.0, 4)], 60.0, 4) == [1.0] * 30 + [0.0] * 30
    assert timeline([(30.5, 4)], 60.0, 4) == [1.0] * 30 + [0.5] + [0.0] * 29
    assert timeline([(10.0, 4), (25.0, 1)], 30.0, 4) == [1.0] * 20 + [0.25] * 30 + [0.0] * 10
