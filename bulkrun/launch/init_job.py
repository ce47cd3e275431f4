"""A job file to start from, made for an input: its columns tell how a row may become a prompt, and are named there."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pyarrow as pa

from bulkrun.data.inputs.reader import open_input
from bulkrun.data.results.schema import passable
from bulkrun.errors import BulkrunError, InputError, UsageError
from bulkrun.job.plan.rows import check_id_column
from bulkrun.job.prompts.detect import BATCH_COLUMNS
from bulkrun.job.prompts.templates import ROW_VARIABLE, columns_of

_IDS = ("id", "row_id", "uuid", "key")
_LIKE_AN_ID = re.compile(r"([^a-zA-Z](id|ID|Id)|[a-z](Id|ID))$")  # ticket_id, ticketId
_SHOWN_COLUMNS = 12
_SHOWN_FIELDS = 4


def write_job(source: str, job: Path) -> None:
    """Write a job file over the input `source` to `job`.

    Raises InputError where the input cannot be read or has no columns, UsageError where the file cannot be written.
    """
    with open_input(source) as dataset:
        dataset.refuse_unreadable()
        schema = dataset.schema
    if not schema.names:
        raise InputError(f"{source!r}: has no rows, so nothing tells its columns; name a file that has some")
    try:
        _write_new(job, job_text(source, schema, job))
    except FileExistsError:
        raise UsageError(f"{job}: already exists; give another name with --out") from None
    except OSError as error:
        raise UsageError(f"{job}: cannot be written: {error.strerror}") from None


def _write_new(path: Path, text: str) -> None:
    """Write a new file. Raises OSError and leaves none then: half a job file would be in the way of the next try."""
    file = path.open("x", encoding="utf-8")
    try:
        with file:
            file.write(text)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def job_text(source: str, schema: pa.Schema, job: Path) -> str:
    """The job file: it runs as it is."""
    name, file = re.sub(r"[^A-Za-z0-9._-]+", "-", job.stem).lstrip("._-") or "job", shlex.quote(str(job))
    id_column = next((column for column in _IDS if _names_rows(column, schema)), None)
    lines = [
        f"# A look at the prompts:  bulkrun preview {file}",
        f"# The first rows:         bulkrun submit {file} --set run.limit=20 --set output.path=out/look",
        f"# All of them:            bulkrun submit {file}",
        "# What the keys mean:     bulkrun schema sampling",
        f"name: {_quoted(name)}",
        "model: bundled:tiny  # to try the pipeline; then a directory or a hub id, as Qwen/Qwen3-0.6B",
        "",
        "input:",
        f"  path: {_quoted(source)}",
        *([f"  id: {_quoted(id_column)}"] if id_column else _perhaps_an_id(schema)),
        *_passed_columns(schema.names, id_column),
        "",
        f"# The input's columns: {_columns(schema)}",
        *_prompt(schema),
        "",
        "sampling: {max_tokens: 256, temperature: 0}",
        f"output: {{path: out/{name}}}",
    ]
    return "\n".join(lines) + "\n"


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
        f"  # id: {_quoted(name)}  # if it names each row: results and errors then do too" for name in islice(named, 1)
    ]


def _passed_columns(names: Sequence[str], id_column: str | None) -> list[str]:
    """The key that leaves out the columns which the results cannot have, where there are some."""
    kept = passable(sorted(names, key=lambda name: name != id_column))
    if len(kept) == len(names):
        return []
    listed = ", ".join(_quoted(name) for name in names if name in kept)
    return [
        "  # The others have the name of a result column, or differ from another one only in case.",
        f"  columns: [{listed}]",
    ]


def _prompt(schema: pa.Schema) -> list[str]:
    names, types = schema.names, dict(zip(schema.names, schema.types, strict=True))
    if set(BATCH_COLUMNS) <= set(names):
        return ["# An OpenAI batch: its lines bring prompts and parameters, so there is no section `prompt`."]
    for name in ("messages", "prompt"):
        if name in names and _is_conversation(types[name]):
            return [f"prompt: {{messages: {name}}}  # the column with the conversation"]
    for name, key in (("messages", "messages"), ("prompt", "column")):  # messages: as JSON text
        if name in names and _is_text(types[name]):
            return [f"prompt: {{{key}: {name}}}"]
    texts = [field.name for field in schema if _is_text(field.type) and field.name not in _IDS]
    column = "text" if "text" in texts else next(iter(texts), names[0])
    return ["prompt:", "  template: |", "    Summarize in one sentence:", f"    {_variable(column)}"]


def _variable(column: str) -> str:
    """How a template prints the column: by its name where Jinja reads that as one."""
    variable = f"{{{{ {column} }}}}"
    is_name = column == ROW_VARIABLE or columns_of(variable) == [column]
    return variable if is_name else f"{{{{ row[{_quoted(column)}] }}}}"


def _is_conversation(kind: pa.DataType) -> bool:
    """Whether values can be lists of {role, content}."""
    part = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    return part is not None and pa.types.is_struct(part) and {"role", "content"} <= {field.name for field in part}


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _columns(schema: pa.Schema) -> str:
    shown = [f"{json.dumps(field.name, ensure_ascii=False)} {_kind(field.type)}" for field in schema][:_SHOWN_COLUMNS]
    more = len(schema) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _kind(kind: pa.DataType) -> str:
    """A type in few words: of a struct the names of its first fields."""
    if pa.types.is_dictionary(kind):
        return _kind(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return f"list of {_kind(kind.value_type)}"
    if pa.types.is_struct(kind):
        names = [_quoted(field.name) for field in kind]
        return f"{{{', '.join(names[:_SHOWN_FIELDS])}{', ...' if len(names) > _SHOWN_FIELDS else ''}}}"
    return "text" if _is_text(kind) else "map" if pa.types.is_map(kind) else str(kind)


def _quoted(text: str) -> str:
    """As YAML and Jinja read it."""
    return json.dumps(text, ensure_ascii=False)
