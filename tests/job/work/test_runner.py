"""The job loop against a fake engine: unbroken = interrupted = resumed, and no bad row is anybody else's problem."""

from __future__ import annotations

import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ErrorRateExceeded, Interrupted, ModelError, RunError
from bulkrun.job.store.events import read_events
from bulkrun.job.store.journal import read_journal, read_outcomes
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.work.engine_runner import EngineLost
from bulkrun.job.work.flight import read_flight
from bulkrun.job.work.runner import RunOutcome
from bulkrun.request import EngineStats, Request
from tests.job.fake_engine import FakeEngine, expected_tokens
from tests.job.small_runs import Row, enter, job, make_rows, make_runner, oracle, results, start, write_plan


@pytest.mark.parametrize("max_num_seqs", [1, 3, 16])
@pytest.mark.parametrize(("n", "temperature"), [(1, 0.0), (1, 1.0), (3, 0.7)])
def test_an_unbroken_run_answers_every_row_in_input_order(
    tmp_path: Path, n: int, temperature: float, max_num_seqs: int
) -> None:
    rows, spec = make_rows(53), job(tmp_path / "out", n=n, temperature=temperature)
    outcome = start(tmp_path / "out", rows, spec, engine=FakeEngine(max_num_seqs))
    assert results(tmp_path / "out") == oracle(rows, spec)
    assert outcome.state == "completed_with_errors" and outcome.totals is not None
    assert (outcome.totals.rows, outcome.totals.errors) == (53, {"bad_input": n * 8})
    assert outcome.totals.ok == n * 45


class StopAfter:
    """`should_stop` that says yes at the n-th question."""

    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


@pytest.mark.parametrize("questions", [0, 1, 3, 7, 20, 45])
def test_an_interrupted_run_continues_until_it_equals_an_unbroken_one(tmp_path: Path, questions: int) -> None:
    rows, spec = make_rows(41), job(tmp_path / "out", n=2, temperature=0.5, max_tokens=30)
    states = []
    for _ in range(100):
        outcome = start(tmp_path / "out", rows, spec, should_stop=StopAfter(questions + len(states)))
        states.append(outcome.state)
        if outcome.state != "interrupted":
            break
    assert states[-1] == "completed_with_errors"
    assert results(tmp_path / "out") == oracle(rows, spec)


def test_a_partial_generation_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = [Row(0, "a", (1, 2, 3))]
    spec = job(tmp_path / "out", max_tokens=400)
    assert len(oracle(rows, spec)[0]["response"]) > 20
    start(tmp_path / "out", rows, spec, should_stop=StopAfter(12))
    engine = FakeEngine()
    start(tmp_path / "out", rows, spec, engine=engine)
    assert len(engine.seen[0].output_token_ids) > 5
    assert results(tmp_path / "out") == oracle(rows, spec)


def test_tokens_in_the_engine_are_not_left_to_make_whichever_attempt_made_them(tmp_path: Path) -> None:
    spec = job(tmp_path, max_tokens=200)
    requests = [Request("", (number,), spec.sampling.to_params()) for number in range(1000)]
    long = [request for request in requests if len(expected_tokens(request)) > 150]
    rows = [Row(row, str(row), tuple(request.prompt_token_ids)) for row, request in enumerate(long[:4])]
    for _ in range(3):
        outcome = start(tmp_path, rows, spec, should_stop=StopAfter(20))
        saved = read_outcomes(RunDir(tmp_path).journals_of(0)).partials.values()
        assert outcome.progress.num_generations == 0, "so that each output is expected to have all of its 200 tokens"
        assert outcome.progress.remaining_tokens == 4 * (1 + 200) - sum(map(len, saved))


def test_a_finished_run_again_does_nothing(tmp_path: Path) -> None:
    rows, spec = make_rows(12), job(tmp_path / "out")
    first = start(tmp_path / "out", rows, spec)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    engine = FakeEngine()
    again = start(tmp_path / "out", rows, spec, engine=engine)
    assert again.totals == first.totals and not engine.seen
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_the_queue_stays_full_across_shard_borders(tmp_path: Path) -> None:
    rows, spec = make_rows(200, error_every=0, duplicate_every=0), job(tmp_path / "out", max_tokens=5)
    engine = FakeEngine(8)
    start(tmp_path / "out", rows, spec, engine=engine, shard_rows=7)
    assert engine.starved_steps <= 5, "only the tail may run with free places"


def test_a_row_of_many_texts_takes_the_places_of_as_many_that_have_not_ended(tmp_path: Path) -> None:
    """Prompts of thousands of texts each would fill the memory, were they counted as one."""

    class Several(FakeEngine):
        def stats(self) -> EngineStats:
            unfinished = [*self._waiting, *(request for request, _ in self._running.values())]
            texts.append(sum(len(request.parts) or 1 for request in unfinished))
            return EngineStats(num_waiting=texts[-1])

    texts = [0]
    parts = {4: [1, 1, 1, 1], 5: [1, 1, 1, 1, 1], 6: [2, 2, 2]}
    rows = [Row(n, f"id-{n}", tuple(range(n, n + 4 + n % 3)), {"parts": parts[4 + n % 3]}) for n in range(40)]
    outcome = start(tmp_path, rows, job(tmp_path, ignore_eos=True), engine=Several(max_num_seqs=4))
    assert outcome.totals is not None and outcome.totals.rows == 40
    assert max(texts) < 2 * 4 + 5, "the last one may be larger than what is left"


def test_equal_greedy_prompts_run_once_and_sampled_ones_each(tmp_path: Path) -> None:
    rows = [Row(number, f"id-{number}", (9, 9)) for number in range(6)] + [Row(6, "x", (9, 9), {"max_tokens": 3})]
    for name, temperature, requests in (("greedy", 0.0, 2), ("sampled", 1.0, 7)):
        engine, spec = FakeEngine(), job(tmp_path / name, temperature=temperature)
        start(tmp_path / name, rows, spec, engine=engine)
        assert len(engine.seen) == requests
        assert results(tmp_path / name) == oracle(rows, spec)


def test_per_row_settings_and_seeds_count(tmp_path: Path) -> None:
    overrides: list[dict[str, Any] | None] = [None, {"max_tokens": 2}, {"seed": 99}, {"temperature": 0.0, "seed": 1}]
    rows = [Row(number, "same-id", (4, 5, 6), given) for number, given in enumerate(overrides)]
    spec = job(tmp_path / "out", temperature=1.0)
    start(tmp_path / "out", rows, spec)
    assert results(tmp_path / "out") == oracle(rows, spec)


def test_an_error_completion_is_a_row_without_text(tmp_path: Path) -> None:
    rows, spec = make_rows(20, error_every=0, duplicate_every=0), job(tmp_path / "out")
    bad = rows[4].token_ids
    outcome = start(tmp_path / "out", rows, spec, engine=FakeEngine(refuse=lambda r: tuple(r.prompt_token_ids) == bad))
    failed = [row for row in results(tmp_path / "out") if row["error_code"]]
    assert [(row["row"], row["response"], row["error_code"]) for row in failed] == [(4, None, "nan_logits")]
    assert outcome.totals is not None and outcome.totals.exit_code == 3


def poison_of(prompts: list[tuple[int, ...] | None], engines: list[FakeEngine], max_num_seqs: int = 16) -> Any:
    """A factory of engines that raise whenever one of these prompts runs."""

    def make(adapter: str = "") -> FakeEngine:
        engines.append(FakeEngine(max_num_seqs, poison=lambda request: tuple(request.prompt_token_ids) in prompts))
        return engines[-1]

    return make


@pytest.mark.parametrize("bad", [[17], [0], [59], [3, 4, 40], [10, 11, 12, 13]])
def test_rows_that_kill_the_engine_are_found_and_the_others_are_unaffected(tmp_path: Path, bad: list[int]) -> None:
    rows, spec = make_rows(60, error_every=0, duplicate_every=0), job(tmp_path / "out")
    engines: list[FakeEngine] = []
    make = poison_of([rows[number].token_ids for number in bad], engines)
    start(tmp_path / "out", rows, spec, engine=make(), rebuild_engine=make)
    got, want = results(tmp_path / "out"), oracle(rows, spec)
    assert [row["row"] for row in got if row["error_code"] == "engine_error"] == bad
    assert [row for row in got if row["row"] not in bad] == [row for row in want if row["row"] not in bad]
    assert len(engines) <= 1 + 4 * len(bad)


def test_an_engine_that_runs_nothing_stops_the_run_and_blames_no_row(tmp_path: Path) -> None:
    rows, spec = make_rows(30), job(tmp_path / "out")

    def make(adapter: str = "") -> FakeEngine:
        return FakeEngine(poison=lambda request: True)

    with pytest.raises(RunError, match="fails on every request"):
        start(tmp_path / "out", rows, spec, engine=make(), rebuild_engine=make)
    start(tmp_path / "out", rows, spec)
    assert results(tmp_path / "out") == oracle(rows, spec)


def test_a_single_row_that_kills_the_engine_ends_the_run_as_an_error_row(tmp_path: Path) -> None:
    spec = job(tmp_path / "out")
    outcome = start(tmp_path / "out", [Row(0, "a", (1,))], spec, engine=FakeEngine(poison=lambda request: True))
    assert outcome.totals is not None and outcome.totals.errors == {"engine_error": 1}


def test_an_engine_that_broke_is_gone_before_the_next_one_is_loaded(tmp_path: Path) -> None:
    rows, spec = make_rows(20, error_every=0, duplicate_every=0), job(tmp_path / "out")
    bad, made = rows[4].token_ids, []

    def make(adapter: str = "") -> FakeEngine:
        assert all(one() is None for one in made), "a GPU has no room for two"
        engine = FakeEngine(16, poison=lambda request: tuple(request.prompt_token_ids) == bad)
        made.append(weakref.ref(engine))
        return engine

    run, record = enter(tmp_path / "out", spec)
    write_plan(run, rows, 10)
    make_runner(run, record, spec, make(), rebuild_engine=make).run()
    assert [row["row"] for row in results(tmp_path / "out") if row["error_code"] == "engine_error"] == [4]
    assert len(made) > 2


@pytest.mark.parametrize("error", [ModelError("the weights do not fit"), RuntimeError("CUDA error: illegal access")])
def test_an_engine_that_cannot_be_loaded_again_ends_the_process_as_a_crash_would(
    tmp_path: Path, error: Exception
) -> None:
    rows, spec = make_rows(20, error_every=0, duplicate_every=0), job(tmp_path / "out")
    bad = rows[4].token_ids

    def refuse(adapter: str) -> FakeEngine:
        raise error

    poisoned = FakeEngine(16, poison=lambda request: tuple(request.prompt_token_ids) == bad)
    said = rf"the engine failed \(\w+: .*\) and cannot be loaded again .* \({type(error).__name__}: {error}\)"
    with pytest.raises(EngineLost, match=said):
        start(tmp_path / "out", rows, spec, engine=poisoned, rebuild_engine=refuse)
    (flight,) = (tmp_path / "out/.bulkrun/flight").glob("*.jsonl")
    assert len(read_flight(flight).left) > 1, "its successor must know what was in the engine"
    (worker,) = (tmp_path / "out/.bulkrun/workers").glob("*.json")
    assert json.loads(worker.read_text())["ended"] is None, "nobody may take it for ended before its death is recorded"
    assert [event["event"] for event in read_events(RunDir(tmp_path / "out"))][-1] == "engine_lost"


def test_a_signal_while_an_engine_is_loaded_again_leaves_its_rows_suspect(tmp_path: Path) -> None:
    rows, spec = make_rows(20, error_every=0, duplicate_every=0), job(tmp_path / "out")

    def stopped(adapter: str) -> FakeEngine:
        raise Interrupted("stopped by SIGTERM")

    engine = FakeEngine(16, poison=lambda request: tuple(request.prompt_token_ids) == rows[4].token_ids)
    assert start(tmp_path / "out", rows, spec, engine=engine, rebuild_engine=stopped).state == "interrupted"
    (flight,) = (tmp_path / "out/.bulkrun/flight").glob("*.jsonl")
    assert len(read_flight(flight).left) > 1


def test_a_hopeless_job_stops_with_everything_saved(tmp_path: Path) -> None:
    rows = make_rows(400, error_every=0, duplicate_every=0)
    spec = job(tmp_path / "out", run={"max_error_rate": 0.3})

    def refuse(request: Request) -> bool:
        return int(request.request_id.split(":")[0]) < 200

    with pytest.raises(ErrorRateExceeded, match=r"max_error_rate = 0\.3"):
        start(tmp_path / "out", rows, spec, engine=FakeEngine(refuse=refuse, step_s=0.02), shard_rows=100)
    run = RunDir(tmp_path / "out")
    saved = sum(len(read_journal(path).records) for path in run.journal.iterdir()) + len(results(run.root))
    assert saved >= 100 and read_totals(run) is None
    assert [event["event"] for event in read_events(run)][-1] == "failed"


def test_a_hopeless_job_stops_at_once_when_it_is_submitted_again_unless_something_may_mend_it(tmp_path: Path) -> None:
    rows, limit = make_rows(400, error_every=0, duplicate_every=0), {"max_error_rate": 0.3}

    def again(run: dict[str, Any], engine: FakeEngine) -> RunOutcome:
        return start(tmp_path / "out", rows, job(tmp_path / "out", run=run), engine=engine, shard_rows=100)

    for seen_before in (False, True):
        engine = FakeEngine(refuse=lambda request: True, step_s=0.02)
        with pytest.raises(ErrorRateExceeded, match="100% of the last"):
            again(limit, engine)
        assert bool(engine.seen) != seen_before
    assert again({**limit, "row_timeout": 60}, FakeEngine()).state == "completed_with_errors"


def test_a_hopeless_job_gives_up_only_while_rows_are_left(tmp_path: Path) -> None:
    rows, spec = make_rows(150, error_every=0, duplicate_every=0), job(tmp_path / "out", run={"max_error_rate": 0.3})
    engine = FakeEngine(150, refuse=lambda request: True)
    assert start(tmp_path / "out", rows, spec, engine=engine, shard_rows=150).state == "completed_with_errors"


def test_outputs_that_turn_out_to_be_no_answers_count_as_failures(tmp_path: Path) -> None:
    """Structure is checked when an output is read, after the engine called it finished."""
    rows = make_rows(400, error_every=0, duplicate_every=0)
    spec = job(tmp_path / "out", structured_outputs={"choice": ["yes", "no"]}, run={"max_error_rate": 0.3})
    with pytest.raises(ErrorRateExceeded, match=r"max_error_rate = 0\.3"):
        start(tmp_path / "out", rows, spec, engine=FakeEngine(step_s=0.02), shard_rows=100)


def test_a_plan_full_of_bad_rows_stops_before_any_work(tmp_path: Path) -> None:
    engine, spec = FakeEngine(), job(tmp_path / "out", run={"max_error_rate": 0.4})
    with pytest.raises(ErrorRateExceeded, match="50% cannot run"):
        start(tmp_path / "out", half_bad(200), spec, engine=engine)
    assert not engine.seen


def half_bad(count: int) -> list[Row]:
    return [Row(row, str(row), (1,), error_code="too_long" if row % 2 else None) for row in range(count)]


def test_an_empty_input_is_a_completed_run(tmp_path: Path) -> None:
    outcome = start(tmp_path / "out", [], job(tmp_path / "out"))
    assert outcome.state == "completed" and outcome.totals is not None and outcome.totals.rows == 0


def test_work_starts_before_the_plan_is_complete(tmp_path: Path) -> None:
    rows, spec = make_rows(60), job(tmp_path / "out")
    run, record = enter(tmp_path / "out", spec)
    write_plan(run, rows[:40], 10, complete=False)
    looks = []

    def plan_the_rest_after_the_first_part() -> bool:
        looks.append(len(run.committed_shards()))
        if looks[-1] and not run.plan_complete.exists():
            write_plan(run, rows, 10)
        return False

    runner = make_runner(run, record, spec, FakeEngine(), should_stop=plan_the_rest_after_the_first_part)
    assert runner.run().state == "completed_with_errors"
    assert results(tmp_path / "out") == oracle(rows, spec)


def test_events_carry_no_text(tmp_path: Path) -> None:
    rows, spec = make_rows(25), job(tmp_path / "out")
    start(tmp_path / "out", rows, spec)
    text = (tmp_path / "out/.bulkrun/events.jsonl").read_text()
    kinds = [json.loads(line)["event"] for line in text.splitlines()]
    assert kinds[0] == "started" and kinds[-1] == "completed_with_errors" and kinds.count("committed") == 3
    assert not any(row["response"] in text for row in oracle(rows, spec) if len(row["response"] or "") > 6)
