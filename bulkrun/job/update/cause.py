"""What a finished run is being changed for: a night, or a retry. The same cause again goes on with what is staged.

Each is the command that a user typed, as values; as a command again it says how to go on.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from bulkrun.data.storage.paths import user_path
from bulkrun.data.storage.remote import is_remote
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import RunRecord


@dataclass(frozen=True)
class Night:
    """A submit of an incremental job that has results. `job` is the hash of tonight's job and input."""

    kind: ClassVar = "incremental"
    job: str
    full_refresh: bool
    on_vanished: str

    def command(self, run: RunDir, record: RunRecord) -> str:
        """The command as a shell takes it; `record` is tonight's."""
        return submit_command(run, record) + (" --full-refresh" if self.full_refresh else "")


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


def submit_command(run: RunDir, record: RunRecord) -> str:
    """The command that a record was made by, as a shell takes it; for a run that was moved, with where it is now."""
    settings = record.overrides
    if _was_moved(run, str(record.job["output"]["path"])):
        elsewhere = [setting for setting in settings if not setting.startswith("output.path=")]
        settings = [*elsewhere, f"output.path={run.root}"]
    return f"bulkrun submit {shlex.quote(record.job_file or 'JOB')}{_options('--set', settings)}"


def _was_moved(run: RunDir, path: str) -> bool:
    """Whether a run lies elsewhere than at its `output.path`, which may be relative to a folder that nobody knows."""
    if is_remote(path):
        return False
    parts = Path(os.path.normpath(user_path(path))).parts
    named = parts[sum(part == ".." for part in parts) :]
    return bool(named) and Path(os.path.normpath(run.root.absolute())).parts[-len(named) :] != named


def _options(name: str, values: Sequence[str]) -> str:
    return "".join(f" {name} {shlex.quote(value)}" for value in values)
