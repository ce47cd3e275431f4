"""Shell variables that somebody wrote into a job file: nothing expands them, so `$OUT` would be a directory's name."""

from __future__ import annotations

import re

from bulkrun.data.storage.hub import is_on_hub
from bulkrun.data.storage.paths import user_path
from bulkrun.data.storage.remote import is_remote
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.spec import JobSpec

_VARIABLE = re.compile(r"\$(\{\w+\}|[A-Za-z_]\w*)")


def refuse_variables(spec: JobSpec) -> None:
    """Raise JobFileError for each path with a `$NAME` in it, unless a file or directory is really called so."""
    paths = spec.input.path if isinstance(spec.input.path, list) else [spec.input.path]
    given = [("output.path", spec.output.path), ("model", spec.model), *(("input.path", path) for path in paths)]
    problems = [
        f"{key}: {text!r} holds {found[0]}, and variables are not expanded in a job file; write the path out, or give "
        f'it on the command line: --set {key}="{text}"'
        for key, text in given
        if (found := _VARIABLE.search(text)) and not _is_there(text)
    ]
    if problems:
        raise JobFileError(problems)


def _is_there(text: str) -> bool:
    """Whether the path up to its last part with a `$` exists as it is written."""
    if is_remote(text) or is_on_hub(text):
        return False
    path = user_path(text)
    with_dollar = [number for number, part in enumerate(path.parts, start=1) if "$" in part]
    return type(path)(*path.parts[: with_dollar[-1]]).exists()
