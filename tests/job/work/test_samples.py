"""Of best_of generations the n most likely are kept, best first; what was generated is counted, kept or not."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.data.results.parts import read_part_info
from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.views.status import read_status
from bulkrun.job.work.samples import keep_samples, spent
from tests.job.fake_engine import FakeEngine, expected_logprob
from tests.job.small_runs import Row, job, make_rows, oracle, results, start


def record(sample: int, logprob: float | None, error: str | None = None) -> JournalRecord:
    extra = {} if logprob is None else {"cumulative_logprob": logprob}
    return JournalRecord((0,), sample, f"text {sample}", error_code=error, extra=extra)


@given(st.lists(st.tuples(st.sampled_from([-3.0, -2.0, -0.5]), st.booleans()), min_size=1, max_size=6), st.data())
def test_what_is_kept_is_never_worse_than_what_is_dropped(given: list[tuple[float, bool]], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(given)))
    outcomes = {
        (0, sample): record(sample, None if failed else logprob, "runaway" if failed else None)
        for sample, (logprob, failed) in enumerate(given)
    }
    kept = keep_samples([0], outcomes, n, len(given))
    assert [(row, sample) for row, sample, _ in kept] == [(0, sample) for sample in range(n)]
    order = [one.sample for _, _, one in kept] + sorted({*range(len(given))} - {one.sample for _, _, one in kept})
    for better, worse in combinations(order, 2):
        if order.index(better) < n:
            key = [(given[s][1], -given[s][0] if not given[s][1] else 0.0, s) for s in (better, worse)]
            assert key[0] < key[1]


def test_rows_that_share_a_generation_are_counted_as_saved() -> None:
    shared = JournalRecord((0, 1, 2), 0, "a", "stop", 5, 7, cached_tokens=4)
    alone = JournalRecord((3,), 0, "b", "repetition", 5, 9, "runaway", "circles")
    cost = spent({(0, 0): shared, (1, 0): shared, (2, 0): shared, (3, 0): alone})
    assert (cost.prompt_tokens, cost.completion_tokens) == (20, 30)
    assert (cost.saved_generations, cost.cached_tokens) == (2, 4)


@pytest.mark.parametrize(("n", "best_of"), [(1, 4), (2, 3), (2, 2)])
def test_a_run_with_best_of_keeps_the_most_likely_samples(tmp_path: Path, n: int, best_of: int) -> None:
    rows, spec = make_rows(23), job(tmp_path / "out", n=n, best_of=best_of, temperature=1.0)
    engine = FakeEngine()
    outcome = start(tmp_path / "out", rows, spec, engine=engine)
    assert results(tmp_path / "out") == oracle(rows, spec)
    runnable = [row for row in rows if row.token_ids]
    assert len(engine.seen) == best_of * len(runnable)
    assert outcome.totals is not None and (outcome.totals.rows, outcome.totals.samples) == (23, n)
    assert outcome.progress.rows_done == outcome.progress.rows_total == 23 * n
    generated = engine.stats().num_output_tokens
    assert outcome.totals.completion_tokens == generated, "what was dropped is counted too"


def test_best_of_survives_interruptions(tmp_path: Path) -> None:
    rows, spec = make_rows(17), job(tmp_path / "out", n=1, best_of=3, temperature=0.5, max_tokens=30)
    for questions in range(5, 200, 9):
        left = [questions]

        def stop(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        outcome = start(tmp_path / "out", rows, spec, should_stop=stop)
        status = read_status(RunDir(tmp_path / "out"))
        assert status.rows_done <= len(rows)
        if outcome.totals is not None:
            break
    assert outcome.totals is not None
    assert results(tmp_path / "out") == oracle(rows, spec)


def test_the_columns_of_probabilities_are_declared_and_filled(tmp_path: Path) -> None:
    rows = [Row(0, "a", (1, 2, 3)), Row(1, "b", None, error_code="bad_input")]
    start(tmp_path / "out", rows, job(tmp_path / "out", logprobs=0, temperature=1.0))
    table = pq.read_table(tmp_path / "out" / "part-00000.parquet")
    [answer, refused] = table.to_pylist()
    logprobs = [expected_logprob(ord(letter)) for letter in answer["response"]]
    assert [entry["logprob"] for entry in answer["logprobs"]] == logprobs
    assert "".join(entry["token"] for entry in answer["logprobs"]) == answer["response"]
    assert answer["cumulative_logprob"] == pytest.approx(sum(logprobs))
    assert (refused["logprobs"], refused["cumulative_logprob"]) == (None, None)


def test_what_identical_prompts_saved_is_in_the_footer_and_in_the_totals(tmp_path: Path) -> None:
    rows = [Row(number, f"id-{number}", (9, 9)) for number in range(6)] + [Row(6, "x", (7,))]
    start(tmp_path / "out", rows, job(tmp_path / "out"), shard_rows=4)
    run = RunDir(tmp_path / "out")
    assert [read_part_info(run.part(shard)).saved_generations for shard in (0, 1)] == [3, 1]
    totals = read_totals(run)
    assert totals is not None and totals.saved_generations == 4


def test_row_timeout_reaches_the_engine(tmp_path: Path) -> None:
    engine = FakeEngine()
    start(tmp_path / "out", make_rows(5), job(tmp_path / "out", run={"row_timeout": 2.5}), engine=engine)
    assert {request.sampling.timeout_s for request in engine.seen} == {2.5}


def test_without_best_of_samples_stay_as_they_were_generated() -> None:
    outcomes = {(0, sample): record(sample, logprob) for sample, logprob in enumerate([-3.0, -1.0, -2.0])}
    assert [one.sample for _, _, one in keep_samples([0], outcomes, 3)] == [0, 1, 2]


def test_trap_cached_value_carries_another_rows_id(tmp_path: Path) -> None:
    """jobs.md section 6 (modelbench#1215): two ids, same prompt: two rows, own ids and own columns."""
    rows = [Row(0, "a", (9, 9)), Row(1, "b", (9, 9)), Row(2, "c", (8,))]
    engine = FakeEngine()
    start(tmp_path / "out", rows, job(tmp_path / "out"), engine=engine)
    found = results(tmp_path / "out")
    assert [(row["row"], row["doc"]) for row in found] == [(0, "text 0"), (1, "text 1"), (2, "text 2")]
    assert found[0]["response"] == found[1]["response"] and len(engine.seen) == 2
