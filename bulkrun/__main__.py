"""`bulkrun` and `python -m bulkrun`: signals are heard first, then the commands are imported and one of them runs."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

_SAVING = ("submit", "worker", "retry")


def run() -> None:
    """A command that works on a run ends as documented from its first moment on, not only once it has begun to."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # until the next line has been imported
    from bulkrun.errors import Interrupted
    from bulkrun.launch.processes.signals import drain_on_signal, end_on_signal

    if next((word for word in sys.argv[1:] if not word.startswith("-")), "") not in _SAVING:
        end_on_signal()
        sys.exit(_exit_code_of(_command()))
    try:
        with drain_on_signal() as drain:
            exit_code = _exit_code_of(_command())
            drain.end_with(exit_code)
    except Interrupted as error:
        with suppress(OSError):  # nobody reads it
            os.write(2, f"{error}\n".encode())
        exit_code = error.exit_code
    sys.exit(exit_code)


def _command() -> Callable[[], None]:
    from bulkrun.cli import run

    return run


def _exit_code_of(command: Callable[[], None]) -> int:
    try:
        command()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    run()
