"""A job file to start from, made for an input: its columns tell how a row may become a prompt, and are named there."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pyarrow as pa

from bulkrun.data.reader import open_input
from bulkrun.errors import InputError, UsageError
from bulkrun.job.prompts.detect import BATCH_COLUMNS

_IDS = ("id", "row_id", "uuid", "key")
_SHOWN_COLUMNS = 12


def write_starter(source: str, job: Path) -> None:
    """Write a job file over the input `source` to `job`.

    Raises InputError where the input cannot be read or has no columns, UsageError where the file cannot be written.
    """
    with open_input(source) as dataset:
        dataset.refuse_unreadable()
        schema = dataset.schema
    if not schema.names:
        raise InputError(f"{source!r}: has no rows, so nothing tells its columns; name a file that has some")
    try:
        with job.open("x", encoding="utf-8") as file:
            file.write(starter_text(source, schema, job))
    except FileExistsError:
        raise UsageError(f"{job}: is there already; give another name with --out") from None
    except OSError as error:
        raise UsageError(f"{job}: cannot be written: {error.strerror}") from None


def starter_text(source: str, schema: pa.Schema, job: Path) -> str:
    """The job file: it runs as it is."""
    name, file = re.sub(r"[^A-Za-z0-9._-]+", "-", job.stem).lstrip("._-") or "job", shlex.quote(str(job))
    lines = [
        f"# A look at the prompts:  bulkrun preview {file}",
        f"# The first rows:         bulkrun submit {file} --set run.limit=20 --set output.path=out/look",
        f"# All of them:            bulkrun submit {file}",
        "# What the keys mean:     bulkrun schema sampling",
        f"name: {name}",
        "model: bundled:tiny  # to try the pipeline; then a directory or a hub id, as Qwen/Qwen3-0.6B",
        "",
        "input:",
        f"  path: {_quoted(source)}",
        *[f"  id: {_quoted(column)}" for column in _IDS if column in schema.names][:1],
        "",
        f"# The input's columns: {_columns(schema)}",
        *_prompt(schema),
        "",
        "sampling: {max_tokens: 256, temperature: 0}",
        f"output: {{path: out/{name}}}",
    ]
    return "\n".join(lines) + "\n"


def _prompt(schema: pa.Schema) -> list[str]:
    names = schema.names
    if set(BATCH_COLUMNS) <= set(names):
        return ["# An OpenAI batch: its lines bring prompts and parameters, so there is no section `prompt`."]
    if "messages" in names:
        return ["prompt: {messages: messages}  # the column with the conversation"]
    if "prompt" in names:
        return ["prompt: {column: prompt}"]
    texts = [field.name for field in schema if _is_text(field.type) and field.name not in _IDS]
    column = "text" if "text" in texts else next(iter(texts), names[0])
    return ["prompt:", "  template: |", "    Summarize in one sentence:", f"    {_variable(column)}"]


def _variable(column: str) -> str:
    return f"{{{{ {column if column.isidentifier() else f'row[{_quoted(column)}]'} }}}}"


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _columns(schema: pa.Schema) -> str:
    shown = [f"{json.dumps(field.name, ensure_ascii=False)} {_kind(field.type)}" for field in schema][:_SHOWN_COLUMNS]
    more = len(schema) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _kind(kind: pa.DataType) -> str:
    return "text" if _is_text(kind) else str(kind)[:40]


def _quoted(text: str) -> str:
    """As YAML and Jinja read it."""
    return json.dumps(text, ensure_ascii=False)
