"""Rows of several adapters: each runs in an engine with its own, whatever fails on the way, and each is loaded once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bulkrun.errors import Interrupted, ModelError
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from bulkrun.job.work.adapter_order import first_adapter, in_own_order
from bulkrun.job.work.deadline import SAVE_S
from bulkrun.job.work.engine_runner import EngineLost
from bulkrun.request import Request
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import Row, enter, job, make_rows, make_runner, oracle, results, write_plan

NAMES = ("", "legal", "poems", "medical")
SHARD_ROWS = 5


def rows_of_adapters(count: int = 80) -> list[Row]:
    """Shards of the four by turns; no two rows have one prompt."""
    rows = make_rows(count, duplicate_every=0)
    return [replace(row, adapter=NAMES[row.row // SHARD_ROWS % len(NAMES)]) for row in rows]


class Engines:
    """Makes engines, each of one adapter, that take no rows of another. `breaks` says which requests kill them."""

    def __init__(self, rows: list[Row], breaks: Callable[[Request], bool] = lambda request: False) -> None:
        self._adapters, self._breaks = {row.row: row.adapter for row in rows}, breaks
        self.made: list[str] = []

    def make(self, adapter: str) -> FakeEngine:
        self.made.append(adapter)

        def poison(request: Request) -> bool:
            assert self._adapters[int(request.request_id.split(":")[0])] == adapter, "a row of another model"
            return self._breaks(request)

        return FakeEngine(6, step_s=0.001, poison=poison)


def test_each_row_runs_with_its_adapter_and_each_adapter_is_loaded_once(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    engines = Engines(rows)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    runner = make_runner(run, record, spec, engines.make("poems"), rebuild_engine=engines.make, adapter="poems")
    totals = runner.run().totals
    assert totals is not None
    assert results(tmp_path) == oracle(rows, spec)
    assert engines.made[0] == "poems" and sorted(engines.made) == sorted(NAMES), "each once"
    events = list(read_events(run))
    assert [event["adapter"] for event in events if event["event"] == "adapter_loaded"] == engines.made[1:]
    computed = events[-1]["computed_prompt_tokens"], events[-1]["computed_output_tokens"]
    assert computed == (totals.prompt_tokens, totals.completion_tokens), "by all engines, not by the last one"


def test_an_engine_that_breaks_is_made_again_with_its_adapter(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    bad = {7, 28}
    engines = Engines(rows, lambda request: int(request.request_id.split(":")[0]) in bad)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    make_runner(run, record, spec, engines.make(""), rebuild_engine=engines.make).run()
    got, want = results(tmp_path), oracle(rows, spec)
    assert {row["row"] for row in got if row["error_code"] == "engine_error"} == bad
    assert [row for row in got if row["row"] not in bad] == [row for row in want if row["row"] not in bad]


def test_workers_begin_with_different_adapters_and_finish_each_others(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(160), job(tmp_path)
    engines = [Engines(rows) for _ in range(3)]
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    workers = [Worker.this_process(f"w{number}") for number in range(3)]
    plan = PlanView(run)
    plan.refresh()

    def work(worker: Worker, made: Engines) -> None:
        first = first_adapter(plan, NAMES, worker.id)
        make_runner(
            run, record, spec, made.make(first), rebuild_engine=made.make, worker=worker, adapter=first, ttl_s=5
        ).run()

    threads = [threading.Thread(target=work, args=pair) for pair in zip(workers, engines, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results(tmp_path) == oracle(rows, spec)
    assert all(len(made.made) <= len(NAMES) + 1 for made in engines), "a shard begun may want its model once more"


def test_a_run_that_is_continued_loads_what_is_left(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    engines, ends = Engines(rows), time.monotonic() + 20

    def is_late() -> bool:
        return len(engines.made) == 3 or time.monotonic() > ends

    runner = make_runner(run, record, spec, engines.make(""), rebuild_engine=engines.make, should_stop=is_late)
    assert runner.run().totals is None and not (tmp_path / "_SUCCESS").exists()
    plan = PlanView(run)
    plan.refresh()
    left = {plan.shards[shard].adapter for shard in plan.open_shards}
    first = first_adapter(plan, NAMES, "next")
    again = Engines(rows)
    make_runner(run, record, spec, again.make(first), rebuild_engine=again.make, adapter=first).run()
    assert results(tmp_path) == oracle(rows, spec)
    assert set(again.made) == left and len(again.made) == len(left)


def refusing(error: Exception) -> Callable[[str], FakeEngine]:
    def refuse(adapter: str) -> FakeEngine:
        raise error

    return refuse


def test_an_adapter_that_is_wrong_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    with pytest.raises(ModelError, match="it does not fit"):
        refuse = refusing(ModelError("legal: it does not fit"))
        make_runner(run, record, spec, Engines(rows).make(""), rebuild_engine=refuse).run()
    again = Engines(rows)
    make_runner(run, record, spec, again.make("legal"), rebuild_engine=again.make, adapter="legal").run()
    assert results(tmp_path) == oracle(rows, spec) and "" not in again.made, "its rows were done"


def test_an_adapter_that_a_device_has_no_room_for_ends_the_process_as_a_crash_would(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    refuse = refusing(RuntimeError("CUDA error: out of memory"))
    with pytest.raises(EngineLost, match=r"adapter '\w+' cannot be loaded in this process \(RuntimeError: CUDA error"):
        make_runner(run, record, spec, Engines(rows).make(""), rebuild_engine=refuse).run()
    assert len(run.committed_shards()) == 4, "those without an adapter"


def test_an_order_of_ones_own_has_all_and_begins_with_any() -> None:
    orders = [in_own_order(NAMES, f"worker-{number}") for number in range(40)]
    assert all(sorted(order) == sorted(NAMES) for order in orders)
    assert {order[0] for order in orders} == set(NAMES)
    assert in_own_order(NAMES, "a") == in_own_order(reversed(NAMES), "a")


def test_before_a_plan_one_of_the_jobs_adapters_is_loaded_and_none_where_there_are_none(tmp_path: Path) -> None:
    plan = PlanView(RunDir(tmp_path))
    assert first_adapter(plan, ("legal",), "w") == "legal"
    assert first_adapter(plan, (), "w") == ""


def test_a_signal_while_an_adapter_loads_saves_and_leaves_no_suspects(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    engines = Engines(rows)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)

    def stopped(adapter: str) -> FakeEngine:
        raise Interrupted("stopped")

    outcome = make_runner(run, record, spec, engines.make(""), rebuild_engine=stopped).run()
    assert outcome.state == "interrupted"
    assert [event["event"] for event in read_events(run)][-1] == "interrupted" and not run.workers_in_flight()
    make_runner(run, record, spec, engines.make("legal"), rebuild_engine=engines.make, adapter="legal").run()
    assert results(tmp_path) == oracle(rows, spec) and sorted(engines.made) == sorted(NAMES), "none of them twice"


def test_no_model_is_loaded_for_rows_that_cannot_finish(tmp_path: Path) -> None:
    rows, spec = rows_of_adapters(), job(tmp_path)
    engines = Engines(rows)
    run, record = enter(tmp_path, spec)
    write_plan(run, rows, SHARD_ROWS)
    end = time.monotonic() + SAVE_S + 60.0
    runner = make_runner(run, record, spec, engines.make(""), rebuild_engine=engines.make, deadline=end, load_s=61.0)
    assert runner.run().state == "interrupted" and engines.made == [""]
    assert len(run.parts()) == 4
