"""What of a job file made for an input is the task's own: its model, and how a row becomes a prompt or a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from bulkrun.data.types.nested import is_text
from bulkrun.errors import UsageError
from bulkrun.job.prompts.detect import BATCH_COLUMNS
from bulkrun.job.prompts.templates import ROW_VARIABLE, columns_of, unknown_column
from bulkrun.settings import Task

IDS = ("id", "row_id", "uuid", "key")
_BUNDLED = "bundled:tiny"


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the job is to do: over which columns (none: those that look right), with which model (None: not said).

    `delimiter` is that of CSV files, where it is not the usual one.
    """

    task: Task = "generate"
    columns: tuple[str, ...] = ()
    model: str | None = None
    delimiter: str | None = None

    @property
    def lacks_model(self) -> bool:
        """Whether the user has to name one: no model for labels comes with bulkrun."""
        return self.task == "classify" and self.model is None


GENERATE = Wanted()


def model_lines(wanted: Wanted, *, is_batch: bool = False) -> list[str]:
    """The keys `task` and `model`, and what the bundled model does not say of itself. A batch's labels are of pairs."""
    task = [] if wanted.task == "generate" else [f"task: {wanted.task}"]
    if wanted.lacks_model:
        if is_batch:
            return [*task, "model:  # TO FILL IN: a reranker (a cross-encoder with one score); a directory or a hub id"]
        trained = "two texts: a reranker, NLI" if len(wanted.columns) == 2 else "your labels, or a reward model"
        return [*task, f"model:  # TO FILL IN: a *ForSequenceClassification for {trained}; a directory or a hub id"]
    if wanted.model not in (None, _BUNDLED) or wanted.task == "classify":
        return [*task, f"model: {quoted(wanted.model or _BUNDLED)}"]
    if wanted.task == "generate":
        return [f"model: {_BUNDLED}  # to try the pipeline; then a directory or a hub id, as Qwen/Qwen3-0.6B"]
    return [
        *task,
        f"model: {_BUNDLED}  # to try the pipeline; then one made for this, as sentence-transformers/all-MiniLM-L6-v2",
        f"embedding: {{pooling: mean}}  # for {_BUNDLED} alone: take this out with it; other models say it themselves",
    ]


def prompt_lines(wanted: Wanted, schema: pa.Schema) -> list[str]:
    """The section `prompt`. Raises UsageError for columns that are not there or that the task cannot take."""
    task, chosen = wanted.task, wanted.columns
    for name in chosen:
        if name not in schema.names:
            raise UsageError(f"--column: {unknown_column(name, schema.names)}")
    if not chosen and set(BATCH_COLUMNS) <= set(schema.names):
        return _of_a_batch(task)
    return _to_continue(chosen, schema) if task == "generate" else _of_texts(task, chosen, schema)


def quoted(text: str) -> str:
    """As YAML and Jinja read it, on one line: both take what is not printable in escapes alone."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n"}
    return f'"{"".join(escapes.get(sign) or (sign if sign.isprintable() else _escape(sign)) for sign in text)}"'


def _escape(sign: str) -> str:
    return f"\\u{ord(sign):04x}" if ord(sign) < 2**16 else f"\\U{ord(sign):08x}"


def _of_a_batch(task: Task) -> list[str]:
    if task == "classify":
        return ["prompt: {score_lines: true}  # an OpenAI batch: its lines, /v1/score and /v1/rerank, bring the pairs"]
    brings = "prompts and parameters" if task == "generate" else "texts"
    lists = [
        "# prompt: {text_lists: true}  # where lines have lists of texts: a vector of each, in embeddings",
        "# prompt: {score_lines: true}  # where lines are of /v1/score and /v1/rerank: the cosines of pairs, in scores",
    ]
    said = f"# An OpenAI batch: its lines bring {brings}, so there is no section `prompt`."
    return [said, *(lists if task == "embed" else [])]


def _to_continue(chosen: Sequence[str], schema: pa.Schema) -> list[str]:
    """A conversation or a whole prompt where a column holds one, or else a template."""
    types = dict(zip(schema.names, schema.types, strict=True))
    whole = [name for name in chosen or ("messages", "prompt", "conversations") if name in types and len(chosen) <= 1]
    for name in whole:
        if _is_conversation(types[name]):
            return [f"prompt: {{messages: {quoted(name)}}}  # the column with the conversation"]
    for name, key in (("messages", "messages"), ("prompt", "column")):  # messages: as JSON text
        if name in whole and is_text(types[name]):
            return [f"prompt: {{{key}: {name}}}"]
    printed = [_printed(name, schema) for name in chosen or [_likeliest(schema, ("text",))]]
    return ["prompt:", "  template: |", *(f"    {line}" for line in ("Summarize in one sentence:", *printed))]


def _of_texts(task: Task, chosen: Sequence[str], schema: pa.Schema) -> list[str]:
    """Of a model that reads texts as they are: one of a row, or two."""
    classifies = task == "classify"
    if classifies and len(chosen) > 2:
        raise UsageError(
            f"--column: {len(chosen)} of them; --task classify takes one, or two for a model of pairs (write "
            "prompt.template for more)"
        )
    first, *more = chosen or [_likeliest(schema, ("text", "prompt"), or_messages=classifies)]
    if classifies and not more and _is_conversation(schema.field(first).type):
        return [f"prompt: {{messages: {quoted(first)}}}  # a conversation, with the answer that is judged"]
    if classifies:
        second = [f"  text_pair: {quoted(_printed(name, schema))}" for name in more] or _perhaps_a_pair(first, schema)
        return ["prompt:", _text([first], schema), *second]
    if not more and _is_list_of_texts(schema.field(first).type):
        return [f"prompt: {{column: {quoted(first)}, text_lists: true}}  # a vector of each text, in embeddings"]
    return ["prompt:", _text([first, *more], schema)]


def _text(columns: Sequence[str], schema: pa.Schema) -> str:
    """The key that names the text of a row: its column, or a template that puts several below each other."""
    if len(columns) == 1 and is_text(schema.field(columns[0]).type):
        return f"  column: {quoted(columns[0])}"
    return f"  template: {quoted(chr(10).join(_printed(name, schema) for name in columns))}"


def _perhaps_a_pair(first: str, schema: pa.Schema) -> list[str]:
    """A key to take the # from, where another column holds text: only the model tells whether it reads two."""
    others = [field.name for field in schema if is_text(field.type) and field.name not in (first, *IDS)]
    if not others:
        return []
    return [f"  # text_pair: {quoted(_variable(others[0]))}  # for a model of two texts (a reranker, NLI): the second"]


def _likeliest(schema: pa.Schema, named: Sequence[str], *, or_messages: bool = False) -> str:
    """A column of those names that holds text, or one with conversations, or any text, or the first one."""
    names: list[str] = schema.names
    texts = [name for name in names if is_text(schema.field(name).type) and name not in IDS]
    talks = [name for name in names if or_messages and _is_conversation(schema.field(name).type)]
    return next(iter([*(name for name in named if name in texts), *talks, *texts, *names]))


def _printed(column: str, schema: pa.Schema) -> str:
    """How a template prints the text of a column, of a conversation what is said in it."""
    variable, field = _variable(column), _field_of_texts(schema.field(column).type)
    return variable if field is None else f'{variable[:-3]} | map(attribute="{field}") | join("\\n") }}}}'


def _variable(column: str) -> str:
    """How a template prints the column: by its name where Jinja reads that as one."""
    variable = f"{{{{ {column} }}}}"
    is_name = column == ROW_VARIABLE or columns_of(variable) == [column]
    return variable if is_name else f"{{{{ row[{quoted(column)}] }}}}"


def _is_list_of_texts(kind: pa.DataType) -> bool:
    return (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and is_text(kind.value_type)


def _is_conversation(kind: pa.DataType) -> bool:
    """Whether values can be lists of messages."""
    return _field_of_texts(kind) is not None


def _field_of_texts(kind: pa.DataType) -> str | None:
    """The field in which messages have their text, {role, content} or ShareGPT's {from, value}; None of all else."""
    part = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if part is None or not pa.types.is_struct(part):
        return None
    names = {field.name for field in part}
    return next((text for speaker, text in (("role", "content"), ("from", "value")) if {speaker, text} <= names), None)
