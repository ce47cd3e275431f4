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

_TAIL = 600  # characters of an output that say why it failed


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
        return f"exit {self.status}: {(self.stderr.strip() or self.stdout.strip())[-_TAIL:]}"


def python(arguments: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Done:
    """Run this Python with arguments and, beside this process's environment, `env`."""
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(env or {})},
        start_new_session=True,
    )
    status = None
    try:
        stdout, stderr = process.communicate(timeout=max(1.0, limit_s))
        status = process.returncode
    except subprocess.TimeoutExpired:
        _end(process)
        stdout, stderr = process.communicate()
    return Done(status, stdout, stderr, time.perf_counter() - start)


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
