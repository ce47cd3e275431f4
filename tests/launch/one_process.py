"""The real `submit` and `retry` on real files, with all that their child processes do in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from bulkrun.errors import Interrupted
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.heartbeat import present
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.store.workers import Worker
from bulkrun.job.update.late_delivery import deliver_late
from bulkrun.launch.engine import engine_factory
from bulkrun.launch.preparation.prepare import PreparedJob, prepare_as_of
from bulkrun.launch.processes.planner import plan_run
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.runs import submit as submit_module
from bulkrun.launch.runs import update as update_module
from bulkrun.launch.runs.run import Submitted
from tests.job.fake_engine import FakeEngine, decode
from tests.job.small_runs import make_runner

Decode = Callable[..., list[str]]


def fake_engine(prepared: PreparedJob) -> tuple[Any, Decode]:
    """No model: for tests that look at anything but the answers."""
    return FakeEngine(), decode


def own_engine(prepared: PreparedJob) -> tuple[Any, Decode]:
    """The job's own model."""
    return engine_factory(prepared)(""), prepared.tokenizer.decode_batch


@contextmanager
def one_process(load: Callable[[PreparedJob], tuple[Any, Decode]] = fake_engine) -> Iterator[None]:
    """Commands plan and work in this process, on the engine that `load` gives them; a signal drains them."""

    def run_here(prepared: PreparedJob, record: RunRecord, view: object, drain: DrainOnSignal) -> Submitted:
        run, spec = prepared.run, JobSpec.model_validate(record.job)
        prepared = prepare_as_of(record, spec, run.root)
        prepared.check_input(record)
        prepared.check_model(record)
        with present(run, planner := Worker.this_process(), "planner"):
            plan_run(run, record, prepared, planner)
        engine, decode = load(prepared)
        drain.started()

        def load_again(adapter: str) -> Any:
            return engine_factory(prepared)(adapter) if adapter else load(prepared)[0]

        rebuilt = {"rebuild_engine": load_again, "should_stop": drain.should_stop}
        make_runner(run, record, spec, engine, decode=decode, **rebuilt).run()
        if (totals := read_totals(run)) is None:
            raise Interrupted("saved")
        deliver_late(run, record, drain.should_stop)  # what a worker was stopped at, as `run_to_end` does
        return Submitted(run, totals, worked=True)

    with ExitStack() as stack:
        for module in (submit_module, update_module):
            stack.enter_context(mock.patch.object(module, "run_to_end", run_here))
        yield
