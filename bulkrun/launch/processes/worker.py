"""One supervised worker: `python -m bulkrun.launch.processes.worker RUN --id ID --supervisor PID --run-id RUN_ID`.

Loads the model and works on the run until it is finished or a signal asks it to save and stop; also when its
supervisor is gone. An error travels to the supervisor as one JSON line (`executors.child_errors`), everything else
that is printed goes to this worker's log.
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

from bulkrun.errors import EXIT_OK, BulkrunError, Interrupted
from bulkrun.executors.allocation import current_allocation, deadline_of
from bulkrun.executors.child_errors import ErrorChannel
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_view import PlanView
from bulkrun.job.store.cancel import CancelWatch
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_own_record
from bulkrun.job.store.workers import Worker
from bulkrun.job.work.adapter_order import first_adapter
from bulkrun.job.work.attempt import Attempt
from bulkrun.job.work.engine_runner import EngineLost
from bulkrun.job.work.pipeline import Pipeline
from bulkrun.job.work.runner import JobRunner
from bulkrun.launch.engine import engine_factory
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.processes.garbage import end_quietly, freeze_heap, release_garbage, spare_heap
from bulkrun.launch.processes.signals import DrainOnSignal, drain_on_signal
from bulkrun.launch.processes.supervisor import Supervisor
from bulkrun.request import Engine

_HEARTBEAT_S = 1.0  # the supervisor shows these numbers


def command(run: RunDir, worker: str, supervisor: int, *, run_id: str) -> list[str]:
    """How a worker is started: of this run, not of one that takes its place in the directory meanwhile."""
    module = [sys.executable, "-m", "bulkrun.launch.processes.worker"]
    return [*module, str(run.root), "--id", worker, "--supervisor", str(supervisor), "--run-id", run_id]


def work(run: RunDir, record: RunRecord, worker: Worker, supervisor: Supervisor, drain: DrainOnSignal) -> int:
    """Be a worker of the run. Returns the exit code; raises every `BulkrunError` of its parts."""
    drain.cancel = CancelWatch(run)
    prepared = prepare(JobSpec.model_validate(record.job), warns=False)
    deadline = deadline_of(current_allocation(), prepared.spec.run.walltime)
    make_engine = engine_factory(prepared)
    plan = PlanView(run)
    plan.refresh()
    adapter = first_adapter(plan, prepared.spec.engine.adapters, worker.id)

    def load_engine(adapter: str) -> Engine:
        prepared.check_model(record, adapter)
        engine = make_engine(adapter)
        # again: a checkpoint that is replaced while it is read is loaded as another's
        prepared.check_model(record, adapter)
        return engine

    def first_engine() -> Engine:  # that only the pipeline holds: one that failed must go before the next one comes
        engine = load_engine(adapter)
        freeze_heap()
        drain.started()
        return engine

    def next_engine(adapter: str) -> Engine:
        release_garbage()
        with drain.starting_again():  # which may take minutes
            engine = load_engine(adapter)
        freeze_heap()
        return engine

    decode = prepared.tokenizer.decode_batch
    attempt = Attempt(run, record, prepared.spec, worker)
    began = time.monotonic()
    pipeline = Pipeline(
        attempt,
        first_engine(),
        decode,
        rebuild_engine=next_engine,
        deadline=deadline,
        adapter=adapter,
        load_s=time.monotonic() - began,
    )
    outcome = JobRunner(
        attempt,
        pipeline,
        should_stop=lambda: drain.should_stop() or supervisor.is_gone(),
        heartbeat_s=_HEARTBEAT_S,
    ).run()
    return EXIT_OK if outcome.totals is not None else Interrupted.exit_code


def allow_open_files() -> None:
    """Let this process open as many files as it may: a worker has a journal for each shard that is open in it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # a system may take less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def main(argv: list[str]) -> int:
    """The child: work on RUN, tell the supervisor of an error."""
    parser = argparse.ArgumentParser(prog="python -m bulkrun.launch.processes.worker")
    parser.add_argument("run", type=Path)
    parser.add_argument("--id", required=True)
    parser.add_argument("--supervisor", type=int, required=True)
    parser.add_argument("--run-id", required=True)
    options = parser.parse_args(argv)
    spare_heap()
    allow_open_files()
    faulthandler.enable()  # a segmentation fault shows in the log where it was
    channel, run, supervisor = ErrorChannel(), RunDir(options.run), Supervisor(options.supervisor)
    try:
        with drain_on_signal(supervised=True) as drain:
            supervisor.tell_me_when_gone()
            if supervisor.is_gone():
                return Interrupted.exit_code
            record = read_own_record(run, options.run_id)
            exit_code = work(run, record, Worker.this_process(options.id), supervisor, drain)
    except EngineLost as error:
        logging.getLogger(__name__).error("%s", error)
        return os.EX_SOFTWARE
    except (BulkrunError, OSError) as error:
        exit_code = channel.tell(error)
    end_quietly()
    return exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
