"""The three streams of a process made fit to be used: closed ones (`>&-`), and encodings that cannot say everything."""

from __future__ import annotations

import io
import os
import sys


def settle_streams() -> None:
    """Give closed streams a place, so that no file of a run gets their number; say what an encoding cannot in escapes.

    Writing to a stdout that was closed is still an error, and says so; what nobody reads on stderr does not matter.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        os.open(os.devnull, os.O_RDONLY)
        sys.stdout = _writer(1)
    if sys.stderr is None:
        os.open(os.devnull, os.O_WRONLY)
        sys.stderr = _writer(2)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _writer(descriptor: int) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(io.FileIO(descriptor, "w", closefd=False)), "utf-8")


def drop_stdout() -> None:
    """Drop what is still buffered for a stdout that cannot be written, instead of failing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
