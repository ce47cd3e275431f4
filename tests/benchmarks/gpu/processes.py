"""Commands with a limit in time, each in a process group of its own that ends with it. Knows no benchmark."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

_TAIL = 600  # characters of an output that say why it failed
_HUNG, _WHERE = "Timeout (", 250  # how faulthandler's watch begins, innermost first, and as many characters of that
LOG_CHARACTERS = 1_000_000  # of one output: a dozen of them must come back from the device machine in one file


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended; `status` None: it was stopped at its limit."""

    status: int | None
    stdout: str
    stderr: str
    seconds: float

    @property
    def failure(self) -> str | None:
        """Why there is no result; None where it ended well."""
        if self.status == 0:
            return None
        if self.status is None:
            return f"stopped after {self.seconds:.0f} s"
        if (hung := self.stderr.rfind(_HUNG)) >= 0:
            return f"it hung: {self.stderr[hung : hung + _WHERE]}"
        return f"exit {self.status}: {(self.stderr.strip() or self.stdout.strip())[-_TAIL:]}"


def python(
    arguments: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None, log: Path | None = None
) -> Done:
    """Run this Python with arguments and, beside this process's environment, `env`.

    `log`: where all that it prints is appended; stderr at once, so that it is there if this process is killed too.
    """
    start = time.perf_counter()
    with _opened(log) as stream:
        stream.write(f"$ python {' '.join(arguments)}\n")
        stream.flush()
        stderr_start = stream.tell()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env={**os.environ, **(env or {})},
            process_group=0,  # no session of its own: a device machine ends those of its command's session
        )
        status, stdout = _outcome(process, max(1.0, limit_s))
        stderr = _settle_log(stream, stderr_start, stdout)
    return Done(status, stdout, stderr, time.perf_counter() - start)


def _opened(log: Path | None) -> IO[str]:
    if log is None:
        return TemporaryFile("a+", encoding="utf-8", errors="replace")
    return log.open("a+", encoding="utf-8", errors="replace")


def _outcome(process: subprocess.Popen[str], limit_s: float) -> tuple[int | None, str]:
    try:
        stdout, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _end(process)
        return None, process.communicate()[0]
    return process.returncode, stdout


def _settle_log(stream: IO[str], stderr_start: int, stdout: str) -> str:
    """What it printed to stderr, which with stdout is shortened in the log where it is too long."""
    stream.seek(stderr_start)
    stderr = stream.read()
    stream.truncate(stderr_start)
    stream.write(f"{_shortened(stderr)}\n--- stdout\n{_shortened(stdout)}\n")
    return stderr


def _shortened(text: str) -> str:
    """Beginning and end."""
    half = LOG_CHARACTERS // 2
    return text if len(text) <= LOG_CHARACTERS else f"{text[:half]}\n... cut ...\n{text[-half:]}"


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
