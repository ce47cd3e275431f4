"""An error that crossed a process is the error it was."""

from __future__ import annotations

import errno
import json
import os

import pytest

from bulkrun.errors import BulkrunError, InputError, JobFileError, RunError
from bulkrun.executors.child_errors import ErrorChannel, received


@pytest.mark.parametrize("error", [RunError("a\nb"), InputError("x"), JobFileError(["a: one", "b: two"])])
def test_an_error_comes_back_as_its_own_class_and_whole(error: BulkrunError) -> None:
    again = received(json.dumps({"error": type(error).__name__, "message": str(error)}))
    assert type(again) is type(error) and (str(again), vars(again)) == (str(error), vars(error))


@pytest.mark.parametrize("name", ["Odd", "annotations", "EXIT_OK", "KeyError"])
def test_a_name_that_is_no_error_of_ours_still_says_its_message(name: str) -> None:
    again = received(json.dumps({"error": name, "message": "why"}))
    assert type(again) is BulkrunError and str(again) == "why"


def test_a_disk_that_fails_is_an_error_with_its_file_and_what_to_do(capfd: pytest.CaptureFixture[str]) -> None:
    """A worker that reads a journal from a failing disk ended with a traceback."""
    stdout = os.dup(1)
    channel = ErrorChannel()
    os.dup2(stdout, 1)
    assert channel.tell(OSError(errno.EIO, "no", "/runs/journal")) == 1
    with pytest.raises(FileNotFoundError):
        channel.tell(FileNotFoundError(errno.ENOENT, "no", "/runs/journal"))
    told = received(capfd.readouterr().out)
    assert isinstance(told, RunError)
    assert str(told).startswith("/runs/journal: Input/output error; the disk or network file system reports an error")


def test_what_a_child_prints_is_no_error_and_what_came_before_its_error_neither(
    capfd: pytest.CaptureFixture[str],
) -> None:
    stdout = os.dup(1)
    channel = ErrorChannel()
    os.write(1, b"a library's words\n")
    os.dup2(stdout, 1)
    channel.send(RunError("why"))
    said = capfd.readouterr()
    assert said.err == "a library's words\n"
    for before in ("", "printed while Python started\n"):
        assert str(received(f"{before}{said.out}")) == "why"


def test_a_message_of_any_length_ends_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent reads when the child has ended: what does not fit into the pipe would keep both waiting for ever."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    monkeypatch.setattr(os, "dup", lambda _: writer)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    ErrorChannel().send(JobFileError([f"\N{SNOWMAN} {number}" * 9 for number in range(10**4)]))
    os.close(writer)
    with os.fdopen(reader) as said:
        told = received(said.read())
    assert isinstance(told, JobFileError) and told.problems[9].startswith("\N{SNOWMAN} 9")


@pytest.mark.parametrize("output", ["", "\n", "Traceback", "[1]", "{}", "7"])
def test_a_child_that_ended_without_a_word_said_nothing(output: str) -> None:
    assert received(output) is None


def test_a_parent_that_is_gone_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(os, "dup", lambda _: writer)
    monkeypatch.setattr(os, "dup2", lambda *_: None)
    ErrorChannel().send(RunError("why"))
    os.close(writer)
