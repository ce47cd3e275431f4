"""The result columns of a job, the usual ones and those that it asks for, declared before row one. Knows no values."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from bulkrun.data.results.json_schema import arrow_type
from bulkrun.data.results.schema import COSINE_FIELDS, RESULT_FIELDS, VECTOR_FIELDS, VECTORS_FIELDS, score_fields
from bulkrun.job.plan.row_key import ROW_KEY
from bulkrun.settings import Task

if TYPE_CHECKING:
    from bulkrun.job.jobfile.spec import JobSpec

INPUT_COLUMNS = "input_columns"  # in the end marker of a plan: those that pass through
TOOL_CALLS = "tool_calls"
PROMPT_TOKEN_IDS, TOKEN_IDS = "prompt_token_ids", "token_ids"
_CALLS = pa.list_(pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())]))
_TOP = pa.struct([("token_id", pa.int32()), ("token", pa.string()), ("logprob", pa.float32())])
_LOGPROBS = pa.list_(pa.struct([*_TOP, ("top", pa.list_(_TOP))]))


def result_fields(spec: JobSpec) -> tuple[pa.Field, ...]:
    """Every column that the job adds to those of the input, in their order in the result."""
    labels = spec.classification.labels or ()
    prompt = spec.prompt
    usual = usual_fields(spec.task, labels, text_lists=prompt.text_lists, score_lines=prompt.score_lines)
    return (*usual, *extra_fields(spec))


def usual_fields(
    task: Task, labels: Sequence[str] = (), *, text_lists: bool = False, score_lines: bool = False
) -> tuple[pa.Field, ...]:
    """The columns that all jobs of a task add; `labels` are those of one that classifies. Of one that embeds
    `text_lists` says that its rows may have several texts, `score_lines` that they are pairs of texts."""
    if task == "classify":
        return score_fields(labels)
    if task == "embed":
        return COSINE_FIELDS if score_lines else VECTORS_FIELDS if text_lists else VECTOR_FIELDS
    return RESULT_FIELDS


def extra_fields(spec: JobSpec) -> tuple[pa.Field, ...]:
    """The columns beyond the usual ones."""
    sampling, fields = spec.sampling, []
    if sampling.thinking is not None:
        fields.append(pa.field("reasoning", pa.string()))
    if sampling.has_calls:
        fields.append(pa.field(TOOL_CALLS, _CALLS))
    if (parsed := parsed_type(spec)) is not None:
        fields.append(pa.field("parsed", parsed))
    if sampling.logprobs is not None:
        fields.append(pa.field("logprobs", _LOGPROBS))
    if sampling.prompt_logprobs is not None:
        fields.append(pa.field("prompt_logprobs", _LOGPROBS))
    if sampling.logprobs is not None or sampling.best_of is not None:
        fields.append(pa.field("cumulative_logprob", pa.float64()))
    if sampling.return_token_ids:
        fields += [pa.field(name, pa.list_(pa.int32())) for name in (PROMPT_TOKEN_IDS, TOKEN_IDS)]
    if spec.run.incremental:
        fields.append(pa.field(ROW_KEY, pa.string()))
    return tuple(fields)


def parsed_type(spec: JobSpec) -> pa.DataType | None:
    """The type of the column `parsed`: that of the job's JSON schema; JSON text where rows have their own; or None.

    A schema that is a path must have been read before (by `prepare`).
    """
    sampling = spec.sampling
    if "structured_outputs" in sampling.per_row:
        return pa.string()
    if sampling.structured_outputs is None or sampling.structured_outputs.json_schema is None:
        return None
    schema = sampling.structured_outputs.json_schema
    assert isinstance(schema, dict), "a schema's path is read when the job is prepared"
    return arrow_type(schema)


def schema_text(schema: pa.Schema) -> str:
    """A schema as text for a JSON document, whatever its types."""
    return base64.b64encode(schema.serialize()).decode()


def schema_of_text(text: str) -> pa.Schema:
    """The schema that `schema_text` wrote."""
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(text)))
