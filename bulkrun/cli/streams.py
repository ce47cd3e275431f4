"""The three streams of a process made fit to be used: closed ones (`>&-`), and encodings that cannot say everything."""

from __future__ import annotations

import io
import os
import select
import sys
from typing import Any, BinaryIO, cast


def repair_streams() -> None:
    """Give closed streams a place, so that no file of a run gets their number; say what an encoding cannot in escapes.

    Writing to a stdout that was closed is still an error, and says so; what nobody can read on stderr does not matter.
    """
    if sys.stdin is None:
        _fill(0, os.O_RDONLY)
    if sys.stdout is None:
        _fill(1, os.O_RDONLY)
        sys.stdout = _writer(_Stdout(1, "w", closefd=False))
    elif type(sys.stdout) is io.TextIOWrapper and sys.stdout.fileno() == 1:
        sys.stdout = _named(sys.stdout)
    if sys.stderr is None:
        _fill(2, os.O_WRONLY)
    if sys.stderr is None or (type(sys.stderr) is io.TextIOWrapper and sys.stderr.fileno() == 2):
        sys.stderr = _writer(_Stderr(2, "w", closefd=False))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def no_bars_without_terminal() -> None:
    """Keep the hub's library from drawing bars into a log; it reads this when it is first imported."""
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def _fill(descriptor: int, flags: int) -> None:
    opened = os.open(os.devnull, flags)
    assert opened == descriptor, "the lowest one that is free"
    os.set_inheritable(opened, True)  # or it is closed again in every child


class _Whole(io.FileIO):
    """Writes all of what it is given: also where nothing is buffered (`python -u`), which would drop the rest without a
    word, and where it is full and somebody made it non-blocking."""

    def write(self, data: Any, /) -> int:
        rest = memoryview(data)
        while rest:
            if (written := super().write(rest)) is None:
                select.select([], [self], [])
            else:
                rest = rest[written:]
        return len(data)


class _Stderr(_Whole):
    """Where it can no longer be written (a full disk, a reader that went away) what is said is dropped: it ends no work
    that it is only about."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            return len(data)


class _Stdout(_Whole):
    """Its errors say that it is stdout: a file that is read has none to say for itself, either."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "stdout"
            raise


def _named(stdout: io.TextIOWrapper) -> io.TextIOWrapper:
    """As Python makes it, also with `python -u`, which buffers nothing."""
    file = _Stdout(1, "w", closefd=False)
    buffered = isinstance(stdout.buffer, io.BufferedWriter)
    return io.TextIOWrapper(
        io.BufferedWriter(file) if buffered else cast(BinaryIO, file),
        stdout.encoding,
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


def _writer(file: io.FileIO) -> io.TextIOWrapper:
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(file), encoding, line_buffering=True)


def reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    asked = select.poll()
    asked.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in asked.poll(0))


def drop_stdout() -> None:
    """Drop what is still buffered for a stdout that cannot be written, instead of failing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
