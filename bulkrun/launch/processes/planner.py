"""Planning in a process of its own, so that templates and tokenizing never take time from the engine's thread.

The child (`python -m bulkrun.launch.processes.planner RUN RUN_ID SUPERVISOR`) loads no torch. It claims the plan, so
that of several workers' planners one plans and the others stand by to take over; it ends when the plan is complete,
when a signal tells it to stop, or when its supervisor, the process of that id, is gone: at once until the input's rows
are fixed, then between two batches. An error travels to the supervisor as one JSON line on its stdout.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bulkrun.errors import BulkrunError, Interrupted, RunError
from bulkrun.executors.child_errors import ErrorChannel, received
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.plan_input import PlanInput
from bulkrun.job.plan.planner import Planner
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.heartbeat import present
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord, read_own_record
from bulkrun.job.store.workers import LifeWatch, Worker
from bulkrun.launch.preparation.prepare import PreparedJob, prepare_as_of
from bulkrun.launch.preparation.tool_calling import warn_of_unoffered_tools
from bulkrun.launch.processes.signals import drain_on_signal
from bulkrun.launch.processes.supervisor import Supervisor

_LOOK_AGAIN_S = 1.0
_STOP_GRACE_S = 5.0


class PlannerProcess:
    """The parent's side: starts the child when the plan is not complete, and notices how it ends."""

    def __init__(self, run: RunDir, run_id: str) -> None:
        self._run = run
        self._child: subprocess.Popen[str] | None = None
        if not run.plan_complete.exists():
            module = [sys.executable, "-m", "bulkrun.launch.processes.planner"]
            command = [*module, str(run.root), run_id, str(os.getpid())]
            # A session of its own: Ctrl-C reaches the parent alone, which then stops the child in order.
            self._child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)

    def check(self) -> None:
        """Raise what ended the child, if it failed."""
        if self._child is None or (code := self._child.poll()) in (None, 0):
            return
        output = self._child.stdout.read() if self._child.stdout else ""
        self._child = None
        raise received(output) or RunError(f"the planner ended with exit status {code}; run the same command again")

    def stop(self) -> None:
        """End the child; what it published stays."""
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(_STOP_GRACE_S)
            self._child.kill()
            self._child.wait()


def plan_run(
    run: RunDir,
    record: RunRecord,
    prepared: PreparedJob,
    worker: Worker,
    should_stop: Callable[[], bool] = lambda: False,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Plan the run to its end, or wait while a live worker does. Raises Interrupted when told to stop before that.

    `started` is called once the input's rows are fixed: a query may take long, and asks nobody whether to stop.
    """
    claims = Claims(run, worker, LifeWatch(run))
    while not run.plan_complete.exists() and not should_stop():
        if not claims.take("plan"):
            time.sleep(_LOOK_AGAIN_S)
            continue
        with prepared.open_dataset(run.sql_snapshot) as dataset:
            prepared.check_input(record)  # with input.sql, after the rows were fixed
            started()
            spec = JobSpec.model_validate(record.job)
            source = PlanInput(spec, dataset, prepared.tokenizer, prepared.max_model_len, should_stop)
            warn_of_unoffered_tools(spec, dataset.schema.names)
            Planner(
                run,
                source,
                worker=worker,
                plan_hash=record.plan_hash,
                check_input=lambda files: None if prepared.spec.input.sql else prepared.check_files(record, files),
            ).plan()
    if not run.plan_complete.exists():
        raise Interrupted("waiting for the plan was stopped; run the same command again and it goes on")


def main(root: Path, run_id: str, supervisor: Supervisor) -> None:
    """The child: plan the run in `root`, tell the supervisor of an error."""
    supervisor.tell_me_when_gone()  # until signals are handled below, that ends this process on the spot
    if supervisor.is_gone():
        sys.exit(Interrupted.exit_code)
    channel, run = ErrorChannel(), RunDir(root)
    try:
        record = read_own_record(run, run_id)
        worker = Worker.this_process()
        with present(run, worker, "planner"), drain_on_signal(supervised=True) as drain:
            # The path in the job may lead elsewhere by now, even to the rows of another run.
            prepared = prepare_as_of(record, JobSpec.model_validate(record.job), root)
            prepared.check_input(record)
            prepared.check_model(record)  # whose tokenizer plans
            plan_run(run, record, prepared, worker, lambda: drain.should_stop() or supervisor.is_gone(), drain.started)
    except (BulkrunError, OSError) as error:
        sys.exit(channel.tell(error))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Supervisor(int(sys.argv[3])))
