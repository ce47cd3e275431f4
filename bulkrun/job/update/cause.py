"""What a finished run is being changed for: a night, or a retry. The same cause again goes on with what is staged.

Each is the command that a user typed, as values; as a command again it says how to go on.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord


@dataclass(frozen=True)
class Night:
    """A submit of an incremental job that has results. `job` is the hash of tonight's job and input."""

    kind: ClassVar = "incremental"
    job: str
    full_refresh: bool
    on_vanished: str

    def command(self, _run: RunDir, record: RunRecord) -> str:
        """The command as a shell takes it; `record` is tonight's."""
        return submit_command(record) + (" --full-refresh" if self.full_refresh else "")


@dataclass(frozen=True)
class Retry:
    """`retry --failed`: the error codes asked for (none: all), and the settings to run with."""

    kind: ClassVar = "retry"
    overrides: tuple[str, ...] = ()
    codes: tuple[str, ...] = ()

    def command(self, run: RunDir, _record: RunRecord) -> str:
        """The command as a shell takes it."""
        options = _options("--set", self.overrides) + _options("--code", self.codes)
        return f"bulkrun retry {shlex.quote(str(run.root))} --failed{options}"


Cause = Night | Retry


def cause_document(cause: Cause) -> dict[str, Any]:
    """The cause as JSON holds it."""
    return {"kind": cause.kind, **asdict(cause)}


def cause_of(document: Mapping[str, Any]) -> Cause:
    """The cause that a document holds. Raises TypeError where it is not this version's."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    kind = values.pop("kind", None)
    if kind == Retry.kind:
        return Retry(**values)
    if kind == Night.kind:
        return Night(**values)
    raise TypeError(f"no kind of update is {kind!r}")


def submit_command(record: RunRecord) -> str:
    """The command that a record was made by, as a shell takes it."""
    return f"bulkrun submit {shlex.quote(record.job_file or 'JOB')}{_options('--set', record.overrides)}"


def _options(name: str, values: Sequence[str]) -> str:
    return "".join(f" {name} {shlex.quote(value)}" for value in values)
