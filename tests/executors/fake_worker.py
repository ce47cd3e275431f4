"""A supervised worker with the fake engine, which dies as told whenever a certain row is in it.

    python -m tests.executors.fake_worker OUT ROWS SHARD_ROWS --id ID [--poison ROW,ROW] [--die segv|exit137|kill|lost]
        [--poisoned-answer ROW] [--supervisor PID]

A poisoned answer lets the engine end it, and kills the process 0.2 s later, when it is read.
The rows are a function of ROWS alone, so that the test can make the oracle.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bulkrun.errors import BulkrunError
from bulkrun.executors.child_errors import ErrorChannel
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.workers import Worker
from bulkrun.job.work.engine_runner import EngineLost
from bulkrun.launch.processes.signals import drain_on_signal
from bulkrun.launch.processes.supervisor import Supervisor
from bulkrun.request import Request
from tests.job import fake_engine
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import Row, job, make_rows, oracle, start


def fail(*_: object) -> FakeEngine:
    """What a GPU does after an illegal access: it fails every call, also those of the next engine."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


WAYS_TO_DIE: dict[str, Callable[[], object]] = {
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "exit137": lambda: os._exit(137),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "lost": fail,
}


def rows_of(count: int) -> list[Row]:
    return make_rows(count, error_every=11, duplicate_every=0)


def job_of(out: Path) -> JobSpec:
    return job(out, max_tokens=24)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("shard_rows", type=int)
    parser.add_argument("--id", required=True)
    parser.add_argument("--poison", type=lambda text: [int(row) for row in text.split(",")], default=[])
    parser.add_argument("--poisoned-answer", type=int)
    parser.add_argument("--die", choices=sorted(WAYS_TO_DIE), default="segv")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--supervisor", type=int, default=os.getppid())
    parser.add_argument("--ttl-s", type=float, default=30.0)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options, channel = parse(argv), ErrorChannel()
    rows = rows_of(options.rows)
    bad = {rows[row].token_ids for row in options.poison}

    def poison(request: Request) -> bool:
        if tuple(request.prompt_token_ids) in bad:
            WAYS_TO_DIE[options.die]()
        return False

    answer = None if options.poisoned_answer is None else oracle(rows, job_of(options.out))[options.poisoned_answer]

    def decode(batch: list[Sequence[int]], **kwargs: bool) -> list[str]:
        texts = fake_engine.decode(batch, **kwargs)
        if answer is not None and any(text.endswith(answer["response"]) for text in texts):
            time.sleep(0.2)
            os._exit(1)
        return texts

    engine = FakeEngine(options.max_num_seqs, step_s=options.step_s, poison=poison)
    try:
        with drain_on_signal(supervised=True) as drain:
            supervisor = Supervisor(options.supervisor)
            supervisor.tell_me_when_gone()
            drain.started()
            outcome = start(
                options.out,
                rows,
                job_of(options.out),
                shard_rows=options.shard_rows,
                engine=engine,
                rebuild_engine=fail,
                decode=decode,
                worker=Worker.this_process(options.id),
                should_stop=lambda: drain.should_stop() or supervisor.is_gone(),
                ttl_s=options.ttl_s,
                heartbeat_s=min(1.0, options.ttl_s / 10),
            )
    except EngineLost:
        return os.EX_SOFTWARE
    except BulkrunError as error:
        channel.send(error)
        return error.exit_code
    return 0 if outcome.totals else 75


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
