"""Every error a user can meet, each with the exit code it ends the process with.

    BulkrunError                1   anything below, caught once by the command line
    |- UsageError               2   a wrong option or argument
    |  `- JobFileError          2   the job file: all problems at once, as file:line:col
    |- InputError               2   an input that cannot be read at all (missing, torn, mixed schemas)
    |- ModelError               1   model not found, unsupported architecture, pickle weights
    |- RunError                 1   the run directory is damaged or not a run
    |- ResumeError              4   the job or its input changed under a resume
    |- ExecutorError            1   Slurm or Ray refused, or is not there
    |- ErrorRateExceeded        1   more rows failed than run.max_error_rate allows
    `- Interrupted              75  stopped and saved: run the same command again

Programmers' mistakes are asserts, not these. A bad *row* is never an exception that leaves the row:
it becomes a `bulkrun.request.RowError` in that row's result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

EXIT_OK = 0
EXIT_ROW_ERRORS = 3  # finished, but some rows hold an error


class BulkrunError(Exception):
    """Base of all errors that are the user's to fix: the message says what, where, and the fix."""

    exit_code = 1


class UsageError(BulkrunError):
    """A command was called with options or arguments that cannot work."""

    exit_code = 2


class JobFileError(UsageError):
    """One or more problems in a job file, one line each: ``file:line:col: key: what``."""

    def __init__(self, problems: list[str]) -> None:
        assert problems, "a JobFileError needs at least one problem"
        super().__init__("\n".join(problems))
        self.problems = problems


class InputError(BulkrunError):
    """An input file that cannot be used at all; names the file and the fix."""

    exit_code = 2


class ModelError(BulkrunError):
    """A model that cannot be found, is not supported, or is not in a safe format."""


class RunError(BulkrunError):
    """A run directory that is missing, damaged, or not a run."""


class ResumeError(BulkrunError):
    """The job or its input is not what this run was started with; the message shows the difference."""

    exit_code = 4


class ExecutorError(BulkrunError):
    """The system that should start the workers refused or is not there; the message has its own words."""


class ErrorRateExceeded(BulkrunError):
    """Too many rows failed (`run.max_error_rate`); what finished is saved."""


class Interrupted(BulkrunError):
    """Stopped by a signal with everything saved; the same command continues the run."""

    exit_code = 75


def rebuilt(name: str, message: str) -> BulkrunError:
    """The error of the class `name` that said `message` in another process."""
    kind = globals().get(name)
    if kind is JobFileError:
        return JobFileError(message.split("\n"))
    return kind(message) if isinstance(kind, type) and issubclass(kind, BulkrunError) else BulkrunError(message)


def did_you_mean(word: str, choices: Iterable[str], shown: Callable[[str], str] = repr) -> str:
    """The question for the one of `choices` that is nearest to `word`, "" where none is near. Case counts for nothing:
    `ID` is near `id`."""
    folded = {choice.casefold(): choice for choice in choices}
    near = get_close_matches(word.casefold(), folded, n=1)
    return f"did you mean {shown(folded[near[0]])}?" if near else ""


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, in one line: its type's name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def described(error: BaseException) -> str:
    """The type of somebody else's error and its first line, for errors that alone say little: `KeyError: 3`."""
    name = type(error).__name__
    return f"{name}: {first_line(error)}" if str(error).strip() else name


def shortened(text: str, limit: int = 60) -> str:
    """The text in at most `limit` characters: what stands in a message may be huge."""
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def shown_value(value: object) -> str:
    """The beginning of a value as Python writes it, on one line; it may be huge, or nested too deeply to be written."""
    try:
        return shortened(" ".join(repr(value).splitlines()))
    except RecursionError:
        return "what is nested too deeply"
