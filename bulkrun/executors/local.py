"""Workers as processes of this machine, under supervision: started, restarted with back-off, stopped in order.

Each worker leads a session of its own, so that Ctrl-C in a terminal reaches the supervisor alone. A worker that ends
with a `BulkrunError` ends the run with it; one that is killed by a signal or ends in an unexpected way is started
again, until several in a row have died without finishing a row. One that is frozen is killed, and so replaced too.
Knows nothing of what workers do.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bulkrun.data.storage.durable import disk_errors, make_dirs, read_bytes
from bulkrun.errors import EXIT_OK, BulkrunError, Interrupted, RunError
from bulkrun.executors.child_errors import received
from bulkrun.executors.frozen import SILENT_S, FrozenWatch
from bulkrun.job.store.events import log_event
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.flight import record_death

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0
DEATHS_IN_A_ROW = 5  # without a row finished between them: the rows are not to blame
DRAIN_S = 10.0
_PYTHON_FAILED = 1  # an exception that nobody caught; with nothing in the engine it would only come again
_MEMORY = " (as the system ends who takes the last of its memory, or of its Slurm job's)"
_STDERR_LINES = 12  # lines of a dead worker's stderr that are shown

Command = Callable[[str], Sequence[str]]


@dataclass
class _Place:
    """One worker's place: the process that has it now, if any, and its predecessors' fate."""

    environment: dict[str, str]
    worker: str = ""
    process: subprocess.Popen[str] | None = None
    start_at: float = 0.0
    deaths: int = 0
    ended: bool = False


class LocalWorkers:
    """The workers of one run on this machine, one for each of `environments`.

    `command` makes the argument list of a worker from its id. Used by one thread; `kill` also by a signal handler.
    """

    def __init__(
        self,
        run: RunDir,
        command: Command,
        environments: Sequence[dict[str, str]],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        silent_s: float = SILENT_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._command, self._first_pause_s, self._clock = run, command, first_pause_s, clock
        self._places = [_Place(environment) for environment in environments]
        self._frozen = FrozenWatch(run, silent_s=silent_s, clock=clock)

    def tend(self) -> bool:
        """Start what is due, look after what ended; whether anybody works or will again.

        Raises the error that ended a worker, and RunError when workers only ever die.
        """
        for place in self._places:
            if place.process is None and not place.ended and self._clock() >= place.start_at:
                self._start(place)
            elif place.process is not None and (code := place.process.poll()) is not None:
                self._reap(place, place.process, code)
            elif place.process is not None and self._frozen.is_frozen(place.worker):
                log_event(self._run, place.worker, "worker_frozen")
                place.process.kill()
        return not all(place.ended for place in self._places)

    def stop(self, grace_s: float = DRAIN_S) -> list[BulkrunError]:
        """Ask all to save and end, and end those that do not. Returns the errors that kept some from saving."""
        processes = [place.process for place in self._places if place.process is not None]
        for process in processes:
            process.terminate()
        deadline = self._clock() + grace_s
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - self._clock()))
        self.kill()
        errors = [self._deregister(place, place.process) for place in self._places if place.process is not None]
        return [error for error in errors if error is not None and not isinstance(error, Interrupted)]

    def kill(self) -> None:
        """End all at once, as kill -9 does."""
        for place in self._places:
            if place.process is not None:
                place.process.kill()

    def _start(self, place: _Place) -> None:
        place.worker = secrets.token_hex(6)
        make_dirs(self._run.logs)
        log = self._log_of(place.worker)
        with disk_errors("creating a worker's log", log), log.open("w") as stderr:
            place.process = subprocess.Popen(
                self._command(place.worker),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **place.environment},
                start_new_session=True,
            )

    def _reap(self, place: _Place, process: subprocess.Popen[str], code: int) -> None:
        """A worker ended: the run's end, an error, or a death."""
        error = self._deregister(place, process)
        if code in (EXIT_OK, Interrupted.exit_code):
            place.ended = True
        elif error is not None:
            raise error
        else:
            self._record_death(place, code)

    def _deregister(self, place: _Place, process: subprocess.Popen[str]) -> BulkrunError | None:
        """Collect what an ended worker left behind: the error it reported, and its log unless that is empty."""
        place.process = None
        output = process.communicate()[0]
        log = self._log_of(place.worker)
        with suppress(OSError):
            if log.stat().st_size == 0:
                log.unlink()
        return received(output)

    def _record_death(self, place: _Place, code: int) -> None:
        """Note a death, and when to start again. Raises RunError when starting again would not help."""
        how = _how_it_ended(code)
        flight = record_death(self._run, place.worker, how)
        if code == _PYTHON_FAILED and not flight.left:
            raise RunError(f"a worker failed before its first row\n{self._stderr_tail(place.worker)}")
        place.deaths = 1 if flight.finished else place.deaths + 1
        log_event(self._run, place.worker, "worker_died", how=how, deaths_in_a_row=place.deaths)
        if place.deaths >= DEATHS_IN_A_ROW:
            raise RunError(
                f"workers died {place.deaths} times in a row without finishing a row, the last with {how}"
                f"{_MEMORY if code == -signal.SIGKILL else ''}; what was finished is saved; fix the cause, then run "
                f"the same command again\n{self._stderr_tail(place.worker)}"
            )
        place.start_at = self._clock() + min(LONGEST_PAUSE_S, self._first_pause_s * 2 ** (place.deaths - 1))

    def _stderr_tail(self, worker: str) -> str:
        log = self._log_of(worker)
        if not log.exists():
            return "it left nothing on stderr"
        lines = read_bytes(log).decode(errors="replace").splitlines()
        return "\n".join([f"{log} ends with:", *(f"  {line}" for line in lines[-_STDERR_LINES:])])

    def _log_of(self, worker: str) -> Path:
        return self._run.logs / f"{worker}.log"


def _how_it_ended(code: int) -> str:
    """An exit status as people say it: signal SIGSEGV, exit status 137."""
    if code < 0:
        with suppress(ValueError):
            return f"signal {signal.Signals(-code).name}"
    return f"exit status {code}" if code >= 0 else f"signal {-code}"
