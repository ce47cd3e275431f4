"""From a job file and `--set` options to a `JobSpec`, or to every problem at once as ``file:line:col: key: what``.

Knows files and places. `strict_yaml` knows YAML, `spec` the keys, `problems` the words.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from bulkrun.data.inputs.files import format_of
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile import strict_yaml
from bulkrun.job.jobfile.problems import SpecProblem, shown, spec_problems, wants_text
from bulkrun.job.jobfile.python_values import as_yaml
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.strict_yaml import UNUSABLE, Document, key_name, parse_yaml

MAX_BYTES = 2**20


def load_job(path: Path, overrides: Sequence[str] = ()) -> JobSpec:
    """The job in the file at `path` with the `--set` values `overrides` (``a.b=c``, c in YAML) put in.

    Raises JobFileError with all problems that were found, in the order of the file.
    """
    job = _Job(str(path), parse_yaml(_read(path)))
    for override in overrides:
        job.override(override)
    return job.validated()


def override_job(values: Mapping[str, Any], overrides: Sequence[str]) -> JobSpec:
    """A recorded job (`JobSpec.model_dump(mode="json")`) with `--set` values put in. Raises JobFileError, by key."""
    job = _Job(None, Document(deepcopy(dict(values)), {(): (1, 1)}))
    for override in overrides:
        job.override(override)
    return job.validated()


def job_of(values: Mapping[str, Any]) -> JobSpec:
    """The job in a dictionary that has the keys of a job file. Raises JobFileError with all problems, by key.

    Values may be a program's own: paths, tuples, numbers of NumPy.
    """
    plain = as_yaml(values)
    try:
        return JobSpec.model_validate(plain)
    except ValidationError as error:
        problems = spec_problems(plain, error)
        raise JobFileError([f"{key_name(problem.path) or 'job'}: {problem.what}" for problem in problems]) from None


def job_schema() -> dict[str, Any]:
    """The JSON schema of a job file, for editors: every key with its default and description."""
    schema = JobSpec.model_json_schema()
    for key in schema["properties"].keys() - set(schema["required"]):
        schema["properties"][key].setdefault("default", {})  # a section whose keys have defaults of their own
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "bulkrun job"}


def _read(path: Path) -> str:
    if format_of(path) is not None and path.is_file():
        command = f"bulkrun init {shlex.quote(str(path))}"
        raise JobFileError([f"{path}: is data, not a job file; `{command}` writes a job file over it"])
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        fix = f"give a file; of a run (an output.path) `bulkrun status {shlex.quote(str(path))}` tells how it stands"
        raise JobFileError([f"{path}: is a directory, not a job file; {fix}"]) from None
    except FileNotFoundError:
        raise JobFileError([f"{path}: no such file (looked from {Path.cwd()})"]) from None
    except OSError as error:
        raise JobFileError([f"{path}: cannot be read: {error.strerror}"]) from None
    if len(data) > MAX_BYTES:
        raise JobFileError([f"{path}: more than {MAX_BYTES} bytes; is this a job file?"])
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise JobFileError([f"{path}:{line}:1: not UTF-8 text; is this a job file?"]) from None


@dataclass
class _Job:
    """The values of a job on their way to a spec, with what is known of their places and problems."""

    file: str | None
    document: Document
    overridden: list[strict_yaml.Path] = field(default_factory=list)
    set_problems: list[str] = field(default_factory=list)
    hints: dict[strict_yaml.Path, str] = field(default_factory=dict)

    def override(self, option: str) -> None:
        """Put the value of ``a.b=c`` in, or note why that cannot be."""
        dotted, equals, text = option.partition("=")
        path: strict_yaml.Path = tuple(dotted.strip().split("."))
        value = parse_yaml(text)
        if not equals or not all(path):
            self.set_problems.append(f"--set {option}: write it as key=value, for example sampling.temperature=0.7")
        elif value.problems:
            hint = _quoting_hint(path, text)
            self.set_problems += [f"--set {key_name(path)}: {problem.what}{hint}" for problem in value.problems]
        elif isinstance(self.document.value, dict):
            self._put(path, value.value)
            if isinstance(value.value, dict | list):
                self.hints[path] = _quoting_hint(path, text)

    def _put(self, path: strict_yaml.Path, value: Any) -> None:
        section = self.document.value
        for depth, part in enumerate(path[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                what = f"{key_name(path[:depth])} is {shown(section)}, not a section of keys; set it whole"
                self.set_problems.append(f"--set {key_name(path)}: {what}")
                return
        section[path[-1]] = value
        self.overridden.append(path)

    def validated(self) -> JobSpec:
        values, problems = self.document.value, [*self._yaml_problems()]
        if isinstance(values, dict):
            try:
                spec = JobSpec.model_validate(values)
                if not problems and not self.set_problems:
                    return spec
            except ValidationError as error:
                problems += [
                    self._located(problem) for problem in spec_problems(values, error) if self._is_new(problem)
                ]
        elif values is not UNUSABLE:
            what = "empty" if values is None else f"{shown(values)}, not keys and values"
            start = "`bulkrun init INPUT --out FILE` writes one to start from, `bulkrun schema` describes the keys"
            problems.append((1, 1, f"{self._place(1, 1)}the job file is {what}; {start}"))
        raise JobFileError([text for _, _, text in sorted(problems)] + self.set_problems)

    def _yaml_problems(self) -> list[tuple[int, int, str]]:
        return [
            (line, column, f"{self._place(line, column)}{f'{key}: ' if key else ''}{what}")
            for line, column, key, what in self.document.problems
        ]

    def _is_new(self, problem: SpecProblem) -> bool:
        """Whether the value was fit to be looked at (YAML's own problem with it has been told)."""
        value = self.document.value
        for part in problem.path:
            if (isinstance(value, dict) and part in value) or isinstance(value, list):
                value = value[part]  # type: ignore[index]
        return value is not UNUSABLE

    def _located(self, problem: SpecProblem) -> tuple[int, int, str]:
        key = f"{key_name(problem.path)}: " if problem.path else ""
        if self._is_overridden(problem.path):
            return 2**31, 0, f"--set {key}{problem.what}{self.hints.get(problem.path, '')}"
        known = (problem.path[:length] for length in range(len(problem.path), -1, -1))
        line, column = next(self.document.marks[path] for path in known if path in self.document.marks)
        return line, column, f"{self._place(line, column)}{key}{problem.what}"

    def _place(self, line: int, column: int) -> str:
        return "" if self.file is None else f"{self.file}:{line}:{column}: "

    def _is_overridden(self, place: strict_yaml.Path) -> bool:
        """Whether what stands there came from `--set`: given whole or from above, or a section made for a key below."""
        given = any(place[: len(path)] == path for path in self.overridden)
        made = any(path[: len(place)] == place for path in self.overridden)
        return given or (made and place not in self.document.marks)


def _quoting_hint(path: strict_yaml.Path, text: str) -> str:
    """What to do where a text with braces or a colon was read as YAML's own."""
    if not wants_text(path) or not any(sign in text for sign in ("{", "[", ": ")):
        return ""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    setting = shlex.quote(f'{key_name(path)}="{escaped}"')  # a template may have single quotes
    return f"; a value is YAML, so quote text with braces or colons once more: --set {setting}"
