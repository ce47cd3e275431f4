"""How a child process tells its parent the error that ended it: one JSON line on the stdout it was started with.

Both sides stand here. The parent raises the same class with the same message, so that a user cannot tell which
process met the error.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress

from bulkrun.data.storage.durable import ADVICE
from bulkrun.errors import BulkrunError, RunError, rebuilt, shortened

_MOST_CHARS = 8000  # six bytes each at most: a pipe, which nobody reads before the child has ended, holds 64 KiB


class ErrorChannel:
    """The child's side. From here on everything else that is printed goes to stderr."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._descriptor = os.dup(1)
        os.dup2(2, 1)

    def tell(self, error: BulkrunError | OSError) -> int:
        """Tell the parent what ended this process; the exit code for it. Raises an OSError that is not of a disk."""
        told = error if isinstance(error, BulkrunError) else _of_disk(error)
        self.send(told)
        return told.exit_code

    def send(self, error: BulkrunError) -> None:
        """Tell the parent, if it is still there, the kind of the error and its message."""
        message = shortened(str(error), _MOST_CHARS)
        line = json.dumps({"error": type(error).__name__, "message": message}) + "\n"
        with suppress(BrokenPipeError):  # a parent that is gone
            os.write(self._descriptor, line.encode())


def _of_disk(error: OSError) -> RunError:
    """What to do about a read that failed: those that write are RunErrors wherever they stand."""
    if error.errno not in ADVICE:
        raise error
    return RunError(f"{error.filename or 'reading a file'}: {os.strerror(error.errno)}; {ADVICE[error.errno]}")


def received(output: str) -> BulkrunError | None:
    """The parent's side: the error in what a child wrote, None when it ended without a word."""
    try:
        said = json.loads(output.strip().splitlines()[-1])
        return rebuilt(said["error"], said["message"])
    except (ValueError, IndexError, KeyError, TypeError):
        return None
