"""A run on Slurm: a readable batch script, an array of identical workers, and the questions asked of the queue.

Every array element is one pull-worker on the run's directory; a lost element costs speed, never rows. Speaks to Slurm's
own programs (sbatch, squeue, scancel, scontrol) and needs no accounting database. Knows no tokens and no tensors.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bulkrun.data.storage.durable import append_line, make_dirs, read_bytes, write_file
from bulkrun.errors import ExecutorError
from bulkrun.executors.slurm_program import SlurmRefused, overriding, slurm
from bulkrun.executors.slurm_words import advice, ending
from bulkrun.job.store.run_dir import RunDir

if TYPE_CHECKING:
    from bulkrun.job.jobfile.cluster import SlurmSpec
    from bulkrun.job.jobfile.spec import JobSpec

_KEYS = ("partition", "account", "qos", "time", "mem", "constraint")


@dataclass(frozen=True)
class QueuedJob:
    """One array element (or a whole array that still waits) as the queue shows it."""

    job_id: str
    state: str  # Slurm's word: PENDING, RUNNING, COMPLETING, ...
    node: str
    reason: str

    @property
    def standing(self) -> str:
        """Its state in words, with the reason and what to do about it."""
        reason = f" ({self.reason})" if self.reason not in ("", "None") else ""
        to_do = advice(self.job_id, self.state, self.reason)
        return f"Slurm job {self.job_id} is {self.state}{reason}" + (f": {to_do}" if to_do else "")


class QueueEntry(NamedTuple):
    """A job of the user's: the ids that it goes by (its own, its array's), its name, and the file that it runs."""

    ids: set[str]
    name: str
    script: Path
    job: QueuedJob


class Submission(NamedTuple):
    """An array that was submitted for a run. `name` is the job's, None in records of earlier versions."""

    job_id: str
    script: str
    name: str | None

    def may_be(self, entry: QueueEntry) -> bool:
        """Whether a job of the queue looks like this one.

        Its id alone says nothing: each cluster begins at 1, and so does one that was set up again.
        """
        return self.job_id in entry.ids and (entry.script.name == self.script or entry.name == self.name)


def batch_script(run: RunDir, name: str, slurm: SlurmSpec, workers: int, command: Sequence[str]) -> str:
    """The text for sbatch: `workers` array elements, each of which becomes `command` (so that signals arrive)."""
    options = [
        f"--job-name={_job_name(name)}",
        f"--array=0-{workers - 1}",
        f"--output={_pattern(run.logs)}/slurm-%A_%a.log",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{slurm.warn}",
        *(f"--{key}={value}" for key in _KEYS if (value := getattr(slurm, key)) is not None),
    ]
    if slurm.gpus is not None:
        options.append(f"--gpus-per-node={slurm.gpus}")
    if slurm.cpus is not None:
        options.append(f"--cpus-per-task={slurm.cpus}")
    lines = [f"#SBATCH {_quoted(option)}" for option in options] + [f"#SBATCH {line}" for line in slurm.extra]
    body = [*slurm.setup, f"exec {shlex.join(command)}"]
    return "\n".join(["#!/bin/bash", *lines, "", *body]) + "\n"


def _job_name(name: str) -> str:
    return f"bulkrun-{name}"


def _quoted(option: str) -> str:
    key, _, value = option.partition("=")
    if re.fullmatch(r"[\w./:@%+,-]*", value):
        return option
    return f'{key}="{value}"'


def _pattern(path: Path) -> str:
    """A path in a file name pattern of Slurm, where a percent sign begins a placeholder."""
    return str(path.resolve()).replace("%", "%%")


def submit_array(run: RunDir, spec: JobSpec) -> str:
    """Write the script into the run and hand it to sbatch; the job id. Raises SlurmRefused with Slurm's own words, and
    ExecutorError where the job may be in the queue all the same."""
    make_dirs(run.logs)
    make_dirs(run.slurm)
    command = [sys.executable, "-m", "bulkrun", "worker", str(run.root.resolve()), *_how_many(spec.slurm)]
    script = run.slurm / f"{datetime.now().strftime('%Y-%m-%dT%H-%M-%S')}.sh"
    text = batch_script(run, spec.name, spec.slurm, spec.slurm.array or spec.run.workers, command)
    write_file(script, text.encode())
    job_id = _job_id(_sbatch(script, overriding(text)))
    submission = Submission(job_id, script.name, _job_name(spec.name))
    append_line(run.slurm_jobs, json.dumps(submission._asdict()).encode())
    return job_id


def _sbatch(script: Path, without: set[str]) -> str:
    """What sbatch prints. A script that stays in the run is one that Slurm may have: the queue is asked for it."""
    try:
        return slurm("sbatch", "--parsable", str(script), without=without)
    except SlurmRefused as error:
        if re.search("timed out|zero bytes", str(error), re.IGNORECASE):  # the answer was lost, not the question
            raise ExecutorError(
                f"{error}; the job may be in the queue all the same: the same command looks there first"
            ) from error
        script.unlink(missing_ok=True)
        raise


def _job_id(said: str) -> str:
    """The number in what `sbatch --parsable` prints: NUMBER or NUMBER;CLUSTER, behind what a site's wrapper adds."""
    last = said.strip().splitlines()[-1] if said.strip() else ""
    if (match := re.fullmatch(r"(\d+)(;.*)?", last.strip())) is None:
        raise ExecutorError(
            f"sbatch: printed {said.strip()[:200]!r} and no job id; `squeue --me` shows whether the job was taken"
        )
    return match[1]


def _how_many(slurm: SlurmSpec) -> list[str]:
    """Workers in one array element: one for each of its GPUs, of whichever types. GPUs that are asked for in words of
    the user's own (`--gres`) it counts there."""
    if slurm.gpus is None and any(re.match("--gres.*gpu|--gpus|-G", line) for line in slurm.extra):
        return []
    counts = [int(gpus.rpartition(":")[2]) for gpus in str(slurm.gpus or 0).split(",")]
    return ["--workers", str(max(1, sum(counts)))]


def submitted_jobs(run: RunDir) -> list[Submission]:
    """Every array that was submitted for this run, oldest first; torn lines are left out."""
    if not run.slurm_jobs.is_file():
        return []
    return [noted for line in read_bytes(run.slurm_jobs).splitlines() if (noted := _noted(line)) is not None]


def _noted(line: bytes) -> Submission | None:
    with suppress(ValueError, TypeError, KeyError):
        noted = json.loads(line)
        return Submission(str(noted["job_id"]), noted["script"], noted.get("name"))
    return None


def may_be_queued(run: RunDir) -> bool:
    """Whether anything of this run was ever given to sbatch; its id may not have come back, or not onto the disk."""
    return bool(submitted_jobs(run)) or next(run.slurm.glob("*.sh"), None) is not None


def queued_jobs(run: RunDir) -> list[QueuedJob]:
    """This run's jobs that are still in the queue: waiting, running or ending."""
    return jobs_of(run, own_queue()) if may_be_queued(run) else []


def own_queue() -> list[QueueEntry]:
    """All of the user's jobs in the queue.

    One id that Slurm has forgotten would make squeue fail for all, so it is asked for no ids. `--all`: those of hidden
    partitions too.
    """
    lines = slurm("squeue", "--me", "--all", "--noheader", "--format=%A|%F|%i|%T|%N|%r|%j|%Z|%o").splitlines()
    rows = [line.split("|", 8) for line in lines if line.count("|") >= 8]
    return [QueueEntry({row[0], row[1]}, row[6], Path(row[7], row[8]), QueuedJob(*row[2:6])) for row in rows]


def jobs_of(run: RunDir, queue: Sequence[QueueEntry]) -> list[QueuedJob]:
    """The jobs of this run in `queue`, those too that a user put there with the run's script.

    The script decides where it is seen from here. Elsewhere (another mount, a site's sbatch that feeds a copy) a job
    is this run's that looks like a submitted one.
    """
    submitted, scripts = submitted_jobs(run), {path.name for path in run.slurm.glob("*.sh")}

    def is_ours(entry: QueueEntry) -> bool:
        name = entry.script.name
        if _is_seen(entry.script):
            return name in scripts and _is_same(entry.script, run.slurm / name)
        return any(one.may_be(entry) for one in submitted)

    return [entry.job for entry in queue if is_ours(entry)]


def how_it_ended(run: RunDir) -> str | None:
    """What Slurm says of the last array that it was given for this run: how elements ended that did not complete.

    None where it says nothing: it forgets a job some minutes after its end, and an accounting database is not
    everywhere. Ids come again on a cluster that was set up again: the job's name must be right too.
    """
    if not (submitted := submitted_jobs(run)):
        return None
    last, name = submitted[-1], re.escape(submitted[-1].name or "")
    shown = _shown("scontrol", "--oneliner", "show", "job", last.job_id)
    states = re.findall(rf"\bJobName={name} .*?\bJobState=(\w+)(?:.*\bExitCode=(\d+))?", shown)
    if not states:
        format_ = "--format=JobName,State,ExitCode"
        shown = _shown("sacct", "-X", "--noheader", "--parsable2", format_, f"--jobs={last.job_id}")
        states = re.findall(rf"^{name}\|(\w+)[^|\n]*(?:\|(\d+))?", shown, re.MULTILINE)
    return None if (how := ending(states)) is None else f"Slurm job {last.job_id} ended: {how}"


def _shown(program: str, *arguments: str) -> str:
    with suppress(ExecutorError):
        return slurm(program, *arguments)
    return ""


def _is_seen(script: Path) -> bool:
    with suppress(OSError):  # in a folder that may not be entered, say
        return script.is_file()
    return False


def _is_same(one: Path, other: Path) -> bool:
    with suppress(OSError):
        return one.samefile(other)
    return False


def cancel_jobs(run: RunDir) -> list[str]:
    """Take this run's arrays out of the queue and stop their elements; the ids that were there."""
    queued = queued_jobs(run)
    ids = sorted({job.job_id.split("_")[0] for job in queued})
    if ids:
        slurm("scancel", *ids)
    return ids
