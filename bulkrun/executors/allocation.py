"""The Slurm job that this process is part of: when it ends, and how it gets its next turn. Reads the environment."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime

from bulkrun.errors import ExecutorError, Interrupted
from bulkrun.executors.slurm_program import slurm

_PATIENCE_S = 15.0


@dataclass(frozen=True)
class Allocation:
    """An allocation or array element, which is ARRAY_INDEX: the number of the last one is the whole array's too.

    `ends_at` is wall-clock time in seconds, None where there is no limit; `restarts` counts its turns before this one.
    """

    job_id: str
    ends_at: float | None
    restarts: int = 0

    def requeue(self) -> bool:
        """See to it that the job starts again after this process; whether the cluster was asked to.

        Where exit 75 requeues by itself (RequeueExit) nothing needs to be asked. Without Slurm's answer the user's next
        `submit` goes on, as it does in an interactive allocation, which Slurm requeues for nobody.
        """
        return self.comes_back() or _say("scontrol", "requeue", self.job_id) is not None

    def comes_back(self) -> bool:
        """Whether the job starts again after exit 75 without being asked to: a batch job where RequeueExit has it."""
        shown = _say("scontrol", "show", "job", self.job_id) or ""
        return re.search(r"\bBatchFlag=[1-9]", shown) is not None and _requeue_exit()

    def end(self) -> None:
        """Take the job out of the queue: its processes, this one too, get SIGTERM and a while to end."""
        _say("scancel", self.job_id)


def current_allocation(environ: Mapping[str, str] = os.environ) -> Allocation | None:
    """The batch job of this process, None outside of one (an interactive allocation is not ours to requeue)."""
    job_id = environ.get("SLURM_JOB_ID")
    if not job_id:
        return None
    if "SLURM_ARRAY_TASK_ID" in environ:
        job_id = f"{environ['SLURM_ARRAY_JOB_ID']}_{environ['SLURM_ARRAY_TASK_ID']}"
    restarts = environ.get("SLURM_RESTART_COUNT", "")  # not there in the first turn
    return Allocation(job_id, _end_time(job_id, environ), int(restarts) if restarts.isdigit() else 0)


def _end_time(job_id: str, environ: Mapping[str, str]) -> float | None:
    stated = environ.get("SLURM_JOB_END_TIME", "")
    if stated.isdigit():
        return float(stated)
    shown = (_say("squeue", "--noheader", "--job", job_id, "--format=%e") or "").strip()
    try:
        return datetime.fromisoformat(shown).timestamp()
    except ValueError:  # "NONE", "N/A": no limit
        return None


def _requeue_exit() -> bool:
    """Whether the cluster queues a batch job again that ends with 75: it names exit codes, and ranges of them."""
    config = _say("scontrol", "show", "config") or ""
    match = re.search(r"^RequeueExit\s*=\s*(.*)$", config, re.MULTILINE)
    codes = re.findall(r"(\d+)(?:-(\d+))?", match[1]) if match is not None else []
    return any(int(first) <= Interrupted.exit_code <= int(last or first) for first, last in codes)


def _say(program: str, *arguments: str) -> str | None:
    """What one of Slurm's programs prints, None when it cannot be asked."""
    with suppress(ExecutorError):
        return slurm(program, *arguments, patience_s=_PATIENCE_S)
    return None


def deadline_of(allocation: Allocation | None, walltime_s: float | None) -> float | None:
    """When this process must be done (monotonic clock): the job's end or `walltime_s` from now, whichever is first."""
    limits = [] if walltime_s is None else [walltime_s]
    if allocation is not None and allocation.ends_at is not None:
        limits.append(allocation.ends_at - time.time())
    return time.monotonic() + min(limits) if limits else None
