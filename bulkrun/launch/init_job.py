"""A job file to start from, made for an input: its columns tell how a row may become a prompt, and are named there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa

from bulkrun.data.inputs.reader import open_input
from bulkrun.data.results.schema import passable
from bulkrun.data.types.json_types import is_unicode
from bulkrun.data.types.nested import is_text
from bulkrun.data.types.sql_names import sql_name
from bulkrun.errors import BulkrunError, InputError, UsageError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.plan.result_columns import usual_fields
from bulkrun.job.plan.rows import check_id_column
from bulkrun.job.prompts.detect import BATCH_COLUMNS
from bulkrun.launch.init_prompt import GENERATE, IDS, Wanted, model_lines, prompt_lines, quoted
from bulkrun.settings import Task

_LIKE_AN_ID = re.compile(r"([^a-zA-Z](id|ID|Id)|[a-z](Id|ID))$")  # ticket_id, ticketId
_SHOWN_COLUMNS = 12
_SHOWN_FIELDS = 4
_SECTIONS: Mapping[Task, str] = {"generate": "sampling", "embed": "embedding", "classify": "classification"}


def make_job(source: str, job: Path, wanted: Wanted = GENERATE) -> str:
    """The text of a job file over the input `source`, for a file that is called `job`.

    Raises InputError where the input cannot be read or has no columns, JobFileError for a delimiter that is none, and
    UsageError for columns that it has not or the task cannot take.
    """
    return job_text(source, _schema_of(source, wanted.delimiter), job, wanted)


def write_job(source: str, job: Path, wanted: Wanted = GENERATE) -> None:
    """Write it to `job`. Raises what `make_job` does, and UsageError where the file cannot be written."""
    text = make_job(source, job, wanted)
    try:
        _write_new(job, text)
    except FileExistsError:
        raise UsageError(f"{job}: already exists; give another name with --out") from None
    except OSError as error:
        raise UsageError(f"{job}: cannot be written: {error.strerror}") from None


def _schema_of(source: str, delimiter: str | None) -> pa.Schema:
    if not is_unicode(source):
        raise InputError(f"{source!a}: the name is not UTF-8, as that of a job file's input has to be; rename it")
    read_by = {"name": "init", "model": "-", "input": {"path": source, "delimiter": delimiter}, "output": {"path": "-"}}
    with open_input(source, delimiter=job_of(read_by).input.delimiter) as dataset:
        dataset.refuse_unreadable()
        schema = dataset.schema
    if not schema.names:
        raise InputError(f"{source!r}: has no rows, so nothing tells its columns; name a file that has some")
    return schema


def _write_new(path: Path, text: str) -> None:
    """Write a new file. Raises OSError and leaves none then: half a job file would be in the way of the next try."""
    file = path.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def job_text(source: str, schema: pa.Schema, job: Path, wanted: Wanted = GENERATE) -> str:
    """The job file: it runs as it is, once it has a model. Raises UsageError for columns that the task cannot take."""
    name, file = re.sub(r"[^A-Za-z0-9._-]+", "-", job.stem).lstrip("._-") or "job", shlex.quote(str(job))
    id_column = next((column for column in IDS if _names_rows(column, schema)), None)
    is_batch = not wanted.columns and set(BATCH_COLUMNS) <= set(schema.names)
    lines = [
        f"# A look at the prompts:  bulkrun preview {file}",
        f"# The first rows:         bulkrun submit {file} --set run.limit=20 --set output.path=out/look",
        f"# All of them:            bulkrun submit {file}",
        f"# What the keys mean:     bulkrun schema {_SECTIONS[wanted.task]}",
        f"name: {quoted(name)}",
        *model_lines(wanted, is_batch=is_batch),
        "",
        "input:",
        f"  path: {quoted(source)}",
        *([] if wanted.delimiter is None else [f"  delimiter: {quoted(wanted.delimiter)}"]),
        *([f"  id: {quoted(id_column)}"] if id_column else _perhaps_an_id(schema)),
        *_passed_columns(schema.names, id_column, wanted.task),
        "",
        f"# The input's columns: {_columns(schema)}",
        *prompt_lines(wanted, schema),
        "",
        *_last_lines(wanted.task),
        f"output: {{path: out/{name}}}",
    ]
    return "\n".join(lines) + "\n"


def _last_lines(task: Task) -> list[str]:
    """How rows run, but for where the results go."""
    if task == "generate":
        return ["sampling: {max_tokens: 256, temperature: 0}"]
    cut = "a text that is longer than the model takes loses its end; without this it is an error row"
    return [f"run: {{on_too_long: truncate_right}}  # {cut}"]


def _names_rows(column: str, schema: pa.Schema) -> bool:
    """Whether it is there and its values have a text."""
    try:
        check_id_column(column, schema)
    except BulkrunError:
        return False
    return True


def _perhaps_an_id(schema: pa.Schema) -> list[str]:
    """A key to take the # from, where a column is named like an id: whether its values are unique was not looked at."""
    if set(BATCH_COLUMNS) <= set(schema.names):
        return []
    named = (name for name in schema.names if _LIKE_AN_ID.search(name) and _names_rows(name, schema))
    return [
        f"  # id: {quoted(name)}  # if it names each row: results and errors then do too" for name in islice(named, 1)
    ]


def _passed_columns(names: Sequence[str], id_column: str | None, task: Task) -> list[str]:
    """The key that leaves out the columns which the results cannot have, where there are some; or how to keep them."""
    results = [field.name for field in usual_fields(task)]
    kept = passable(sorted(names, key=lambda name: name != id_column), results)
    if len(kept) == len(names):
        return []
    listed = ", ".join(quoted(name) for name in names if name in kept)
    renamed = ", ".join(f'"{name}" AS "input_{name}"' for name in names if sql_name(name) in results)
    return [
        "  # The others have the name of a result column, or differ from another one only in case.",
        f"  columns: [{listed}]",
        *([f"  # sql: SELECT * RENAME ({renamed}) FROM input  # in place of columns: keeps them"] if renamed else []),
    ]


def _columns(schema: pa.Schema) -> str:
    shown = [f"{quoted(field.name)} {_kind(field.type)}" for field in schema][:_SHOWN_COLUMNS]
    more = len(schema) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _kind(kind: pa.DataType) -> str:
    """A type in few words: of a struct the names of its first fields."""
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pa.types.is_struct(kind):
        names = [quoted(field.name) for field in kind]
        return f"{{{', '.join(names[:_SHOWN_FIELDS])}{', ...' if len(names) > _SHOWN_FIELDS else ''}}}"
    return "text" if is_text(kind) else "map" if pa.types.is_map(kind) else str(kind)
