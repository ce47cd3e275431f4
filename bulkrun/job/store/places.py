"""Where a run's directory is, and whether one can be there.

It is at `output.path`, or, for results in a bucket, where `output.state` says: the state of a run needs a file system.
Without `output.state` it is below XDG_STATE_HOME (or ~/.local/state), in a directory named by the URL and the store it
is asked from. RUN on a command line is that directory, or the URL itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from functools import partial
from pathlib import Path

from bulkrun.data.storage.paths import user_path
from bulkrun.data.storage.remote import insist, is_remote
from bulkrun.data.storage.store_errors import endpoint
from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import JobFileError, RunError, UsageError
from bulkrun.job.store.bucket_owner import OWNER
from bulkrun.job.store.object_store import ObjectPrefix
from bulkrun.job.store.run_dir import RunDir


def run_dir_of(path: str, state: str | None) -> RunDir:
    """The run directory of a job with this `output.path` and `output.state`. Raises UsageError without a place."""
    if not is_remote(path):
        return RunDir(user_path(path))
    return RunDir(user_path(state) if state else _default_state(path))


def find_run(run: str) -> RunDir:
    """The run that RUN on a command line means. Raises RunError for a URL whose state is not on this machine."""
    if not is_remote(run):
        return RunDir(user_path(run))
    found = RunDir(_default_state(run))
    if found.run_json.exists():
        return found
    owner = insist(partial(ObjectPrefix(run).read_json, OWNER))
    told = RunDir(Path(str(owner.get("state"))))
    if told.run_json.exists():
        return told
    raise RunError(f"{run}: the state of this run is in {told.root} on {owner.get('host')}, not on this machine")


def check_place(run: RunDir) -> None:
    """Raise JobFileError where the run's directory cannot be made or written: asked of what is there of its path."""
    refuse_odd_place(run)
    there = next(path for path in (run.root.absolute(), *run.root.absolute().parents) if path.exists())
    if not there.is_dir():
        raise JobFileError([f"output.path: {there} is a file, not a directory; choose another output.path"])
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=".bulkrun-"):
            pass
    except OSError as error:
        what = f"nothing can be written in {there}: {error.strerror or error}"
        raise JobFileError([f"output.path: {what}; choose another output.path"]) from None


def refuse_odd_place(run: RunDir) -> None:
    """Raise JobFileError for the place that is for what is staged in a run, and for one that nobody could read."""
    if not is_unicode(str(run.root.absolute())):
        what = f"{str(run.root.absolute())!a} is not UTF-8, where no Parquet file can be read"
        raise JobFileError([f"output.path: {what}; rename the folder, or choose another output.path"])
    if run.is_staged:
        what = f"{run.root} is where bulkrun keeps the rows of a retry or an incremental night"
        raise JobFileError([f"output.path: {what}; choose another output.path"])


def _default_state(url: str) -> Path:
    try:
        home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    except RuntimeError:  # a uid that no passwd knows, without HOME
        raise UsageError(f"{url}: there is no home directory for its state; set output.state or HOME") from None
    url = url.rstrip("/")
    name = re.sub(r"[^A-Za-z0-9]+", "-", url.removeprefix("s3://")).strip("-")[-60:]
    digest = hashlib.blake2b(f"{endpoint()} {url}".encode(), digest_size=6).hexdigest()
    return Path(home) / "bulkrun" / "runs" / f"{name}-{digest}"
