"""Rates are of the last minute, and the time left follows the tokens that are left."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from bulkrun.data.results.parts import PartInfo
from bulkrun.errors import ErrorRateExceeded
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.plan.plan_view import PlannedCounts, PlanView
from bulkrun.job.plan.shard_file import ShardInfo
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.error_rate import ErrorRate
from bulkrun.job.work.progress import WorkerProgress
from bulkrun.request import Completion, EngineStats
from tests.job.small_runs import enter, job
from tests.job.store.test_workers import Clock


def plan_of(path: Path, shards: list[ShardInfo]) -> PlanView:
    plan = PlanView(RunDir(path))
    plan.shards = {shard.shard: shard for shard in shards}
    return plan


def completion(prompt_tokens: int, output_tokens: int) -> Completion:
    return Completion("r", (), "stop", num_prompt_tokens=prompt_tokens, num_output_tokens=output_tokens)


def part(shard: int, rows: int, errors: int = 0) -> PartInfo:
    return PartInfo("r", "p", shard, "a", rows, rows, {"x": errors} if errors else {}, 10 * rows, 5 * rows, {})


def test_rows_come_from_parts_and_open_shards_without_counting_any_twice(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [ShardInfo(number, 0, 10, 100, 0) for number in range(3)])
    progress = WorkerProgress(plan, SamplingSpec(max_tokens=8), Clock(), max_model_len=2048)
    progress.committed(0, part(0, 10, errors=2))
    progress.opened(1, already_done=4, refused=1)
    progress.answered(1, 3, completion(7, 5))
    snapshot = progress.snapshot()
    assert (snapshot.rows_total, snapshot.rows_done, snapshot.error_rows) == (30, 18, 3)
    assert (snapshot.prompt_tokens, snapshot.completion_tokens) == (100 + 21, 50 + 15)
    progress.committed(1, part(1, 10, errors=1))
    progress.answered(1, 3, completion(7, 5))
    assert progress.snapshot().rows_done == 20


def test_rates_forget_what_is_older_than_a_minute(tmp_path: Path) -> None:
    clock = Clock()
    progress = WorkerProgress(plan_of(tmp_path, []), SamplingSpec(max_tokens=8), clock, max_model_len=2048)
    tokens = 0
    for second in range(200):
        tokens += 1000 if second < 100 else 10
        clock.now += 1
        progress.engine(EngineStats(num_output_tokens=tokens))
    assert progress.snapshot().completion_tokens_per_s == pytest.approx(10)


def test_the_eta_of_a_length_sorted_job_is_near_the_truth_all_along(tmp_path: Path) -> None:
    """Ten shards, prompts shrinking from 1000 to 100 tokens; rows alone would be wrong by a factor of two."""
    clock, rng = Clock(), random.Random(1)
    shards = [ShardInfo(number, 0, 20, 20 * (1000 - 100 * number), 0) for number in range(10)]
    plan = plan_of(tmp_path, shards)
    progress = WorkerProgress(plan, SamplingSpec(max_tokens=50), clock, max_model_len=2048)
    prompt_tokens = output_tokens = 0
    speed, estimates = 500.0, []
    for info in shards:
        progress.opened(info.shard, 0)
        for _ in range(info.rows):
            prompt, output = info.prompt_tokens // info.rows, rng.randint(20, 60)
            prompt_tokens, output_tokens = prompt_tokens + prompt, output_tokens + output
            clock.now += (prompt + output) / speed
            progress.answered(info.shard, 1, completion(prompt, output))
            progress.engine(EngineStats(num_prompt_tokens=prompt_tokens, num_output_tokens=output_tokens))
            estimates.append((clock.now, progress.snapshot().eta_s))
        plan.committed.add(info.shard)
        progress.committed(info.shard, part(info.shard, info.rows))
    for now, eta in estimates[:150]:
        assert eta is not None and abs(eta - (clock.now - now)) < 0.15 * (clock.now - now)


def test_no_output_is_expected_to_be_longer_than_the_model_allows(tmp_path: Path) -> None:
    """Else a worker that knows its end begins hardly a row of a job that says "as many as fit" with a large number."""
    plan = plan_of(tmp_path, [ShardInfo(0, 0, 10, 100, 0)])
    progress = WorkerProgress(plan, SamplingSpec(max_tokens=10**400), Clock(), max_model_len=2048)
    assert progress.mean_output == 2048
    assert progress.snapshot().rows_done == 0


def test_hopeless_jobs_are_told_from_unlucky_ones(tmp_path: Path) -> None:
    def new_rate(name: str, limit: float) -> ErrorRate:
        return ErrorRate(*enter(tmp_path / name, job(tmp_path / name)), limit)

    rate = new_rate("one", 0.5)
    rate.ran(99, failed=True)
    rate.check(PlannedCounts(99, 99))
    rate.ran(1000, failed=False)
    rate.ran(500, failed=True)
    rate.check(PlannedCounts(0, 0))
    rate.ran(1, failed=True)
    with pytest.raises(ErrorRateExceeded, match="bulkrun errors"):
        rate.check(PlannedCounts(0, 0))
    with pytest.raises(ErrorRateExceeded, match="60% cannot run at all"):
        new_rate("refused", 0.5).check(PlannedCounts(100, 60))
    both = new_rate("both", 0.5)
    both.ran(1000, failed=False)
    both.ran(400, failed=True)
    with pytest.raises(ErrorRateExceeded):
        both.check(PlannedCounts(1000, 200))
    always = new_rate("always", 1.0)
    always.ran(1000, failed=True)
    always.check(PlannedCounts(1000, 1000))


def test_what_a_worker_gave_up_for_counts_with_what_went_well_until_something_may_have_mended_it(
    tmp_path: Path,
) -> None:
    run, record = enter(tmp_path, job(tmp_path))
    rate = ErrorRate(run, record, 0.3)
    rate.ran(600, failed=False)
    rate.ran(400, failed=True)
    with pytest.raises(ErrorRateExceeded, match="40% of the rows fail"):
        rate.check(PlannedCounts(0, 0))
    with pytest.raises(ErrorRateExceeded, match="40% of the rows fail"):
        ErrorRate(run, record, 0.3).check(PlannedCounts(0, 0))
    ErrorRate(run, record, 0.5).check(PlannedCounts(0, 0))
    ErrorRate(run, replace(record, versions={"bulkrun": "1"}), 0.3).check(PlannedCounts(0, 0))
