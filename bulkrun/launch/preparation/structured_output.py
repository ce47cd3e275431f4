"""What outputs must look like, checked before anything runs: a schema's file read, grammars and markers tried.

Knows how a job says it and what the text side can do with it; knows no engine.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from bulkrun.data.results.schema_check import check_schema
from bulkrun.data.storage.paths import user_path
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.structured_outputs import StructuredOutputsSpec
from bulkrun.job.jobfile.thought_markers import CHANNELS, THOUGHTS
from bulkrun.text.grammar import check_grammar
from bulkrun.text.thinking import ThinkingMarkers
from bulkrun.text.token_lists import word_token_ids
from bulkrun.text.tokenizer import Tokenizer

_KEY = "sampling.structured_outputs"
_MARKERS = {"GptOssForCausalLM": CHANNELS}


def with_schema(spec: JobSpec) -> JobSpec:
    """The spec with a schema's path replaced by the schema, and whatever outputs must look like compiled once.

    Raises JobFileError for a file, schema, regex or grammar that cannot be used.
    """
    structured = spec.sampling.structured_outputs
    if structured is None:
        return spec
    if isinstance(structured.json_schema, str):
        schema = _read_schema(user_path(structured.json_schema))
        structured = structured.model_copy(update={"json_schema": schema})
    _check(structured)
    return spec.with_keys(sampling={"structured_outputs": structured})


def with_markers(spec: JobSpec, architecture: str) -> JobSpec:
    """The spec with the markers of thoughts that this architecture writes, where it names none.

    A known format of tool calls (`with_tool_format`) tells them too.
    """
    thinking, calls = spec.sampling.thinking, spec.sampling.tool_calls
    of_calls = None if calls is None else THOUGHTS.get(calls.format)
    markers = of_calls or _MARKERS.get(architecture)
    if thinking is None or markers is None or thinking.start is not None or thinking.end is not None:
        return spec
    named = thinking.model_copy(update={"start": markers[0], "end": markers[1]})
    return spec.with_keys(sampling={"thinking": named})


def warn_of_channels(spec: JobSpec, architecture: str) -> None:
    """Say so where a model's thoughts would stay in the responses, behind the names of its channels."""
    if spec.sampling.thinking is None and architecture in _MARKERS:
        logging.getLogger(__name__).warning(
            "this model thinks before it answers: responses will hold both, with the names of its channels; "
            "`sampling: {thinking: {}}` in the job file gives thoughts the column `reasoning`"
        )


def check_thinking(spec: JobSpec, tokenizer: Tokenizer) -> None:
    """Raise JobFileError where thoughts are to be bound and the model cannot write their markers."""
    thinking, sampling = spec.sampling.thinking, spec.sampling
    if thinking is None or (thinking.max_tokens is None and sampling.structured_outputs is None):
        return
    markers = thinking.to_param()
    try:
        ThinkingMarkers(tokenizer, markers.start, markers.end)
    except ValueError as problem:
        raise JobFileError([f"sampling.{problem}"]) from None


def check_bad_words(spec: JobSpec, tokenizer: Tokenizer) -> None:
    """Raise JobFileError for a forbidden word that the model has no tokens for: every row would fail by it."""
    try:
        word_token_ids(tokenizer, spec.sampling.bad_words)
    except ValueError as problem:
        raise JobFileError([f"sampling.{problem}"]) from None


def _read_schema(path: Path) -> dict[str, Any]:
    try:
        schema = json.loads(path.read_text(encoding="utf-8-sig"))
        check_schema(schema)
    except FileNotFoundError:
        raise JobFileError([f"{_KEY}.json: {path}: no such file (looked from {Path.cwd()})"]) from None
    except OSError as error:
        raise JobFileError([f"{_KEY}.json: {path}: cannot be read: {error.strerror}"]) from None
    except (ValueError, RecursionError) as problem:
        raise JobFileError([f"{_KEY}.json: {path}: {problem}"]) from None
    assert isinstance(schema, dict), "check_schema refuses everything else"
    return schema


def _check(structured: StructuredOutputsSpec) -> None:
    param = structured.to_param()
    try:
        if param.kind == "json":
            check_schema(structured.json_schema)
        check_grammar(param)
    except ValueError as problem:
        raise JobFileError([f"{_KEY}.{param.kind}: {problem}"]) from None
