"""The files of a job's input: found once, told from all others, and looked at again while they are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from bulkrun.data.inputs.files import InputFile, find_files
from bulkrun.data.storage.paths import would_take
from bulkrun.data.storage.remote import RemotePath, find_objects, is_remote
from bulkrun.errors import InputError, JobFileError, ResumeError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_record import RunRecord

Facts = list[list[Any]]  # of each file its size, its mtime in ns and its fingerprint, as a run's record holds them

_SHOWN_FILES = 3


def find_input(spec: JobSpec) -> list[InputFile]:
    """The files that `input.path` means, in order.

    Raises InputError where there are none, with the job's hint how to make them, and JobFileError where the run's own
    results would be among them.
    """
    _refuse_own_results(spec)
    try:
        return find_files(spec.input.path)
    except InputError as error:
        if spec.input.hint is None:
            raise
        raise InputError(f"{error}\n  how to make it: {spec.input.hint}") from None


def _refuse_own_results(spec: JobSpec) -> None:
    """Raise JobFileError where the input would hold the run's own results from its first part on."""
    paths, output = spec.input.path, spec.output.path
    for path in [paths] if isinstance(paths, str) else paths:
        if would_take(path, output):
            what = f"{output!r} lies in what input.path {path!r} reads, so the run would read its own results"
            fix = "choose a directory outside of it, or one whose name begins with _, which no input path reads"
            raise JobFileError([f"output.path: {what}; {fix}"])


def facts_of(files: Iterable[InputFile]) -> Facts:
    """What tells these files from any others, wherever they are."""
    return [[file.size, file.mtime_ns, file.fingerprint()] for file in files]


def known_files(record: RunRecord) -> Facts:
    """The facts of the files that a run was entered with."""
    return record.identity["input"].get("files") or []


def named_others(files: Sequence[InputFile], known: Facts) -> str:
    """A line with the first of `files` that are not among the `known`; nothing where all are."""
    before = set(map(tuple, known))
    names = [str(file.path) for file, now in zip(files, facts_of(files), strict=True) if tuple(now) not in before]
    more = ", ..." if len(names) > _SHOWN_FILES else ""
    return f"\nNew or changed: {', '.join(names[:_SHOWN_FILES])}{more}" if names else ""


def check_unchanged(spec: JobSpec, files: Sequence[InputFile], known: Facts) -> None:
    """Look at `files`, the input's, again. Raises ResumeError when they are no longer the `known` ones.

    Objects are looked at by listing them once more: a request for each would take minutes for thousands.
    """
    objects = [file.path for file in files if isinstance(file.path, RemotePath)]
    etags = _etags_now(spec) if objects else {}
    for path in objects:
        path.check_same(etags.get(path.url))
    found = facts_of(file.looked_at_again() for file in files)
    if files and found != known:
        pairs = zip(files, found, known, strict=False)
        raise _changed(next((file.path for file, now, before in pairs if now != before), "the list of files"))


def check_still_there(files: Sequence[InputFile], known: Facts) -> None:
    """The same for a few of them. An object needs no look: it is read as it was found, or not at all."""
    for file, before in zip(files, known, strict=False):
        if not isinstance(file.path, RemotePath) and facts_of([file.looked_at_again()]) != [before]:
            raise _changed(file.path)


def _etags_now(spec: JobSpec) -> dict[str, str]:
    paths = [spec.input.path] if isinstance(spec.input.path, str) else spec.input.path
    return {path.url: path.etag for pattern in filter(is_remote, paths) for path in find_objects(pattern)[0]}


def _changed(what: object) -> ResumeError:
    return ResumeError(
        f"input.path: {what} changed since the run began; give it an input that does not change, and start over with "
        "--fresh"
    )
