"""What a prompt that is answered in text gives back: `RequestOutput`, made of the engine's completions.

Knows answers and how they are read; knows no engine and no streams.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bulkrun.job.outputs.tool_calls import with_ids
from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.job.work.shard_work import Generation
from bulkrun.launch.python_api.prompt_stream import Asked, Ended
from bulkrun.request import FinishReason, RowError


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt, the `index`-th of its call.

    `error` is None if and only if there is an answer; a prompt that failed may have the text that came before. An
    answer that is nothing but tool calls has `tool_calls` ({id, name, arguments as JSON text}) and no `text`.
    `reasoning`, `tool_calls`, `parsed` and the log-probabilities are there where the sampling asks for them.
    """

    index: int
    prompt: str | None  # as text, None where token ids or nothing usable were given
    text: str | None
    finish_reason: FinishReason
    error: RowError | None = None
    prompt_token_ids: tuple[int, ...] = ()  # as the model was given them
    token_ids: tuple[int, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    reasoning: str | None = None
    tool_calls: list[dict[str, str]] | None = None
    parsed: Any = None
    logprobs: list[dict[str, Any]] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    cumulative_logprob: float | None = None


class TextOutputs:
    """Reads answers of one call: `reader` is for one thread at a time."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader

    def refused(self, index: int, asked: Asked) -> RequestOutput:
        """The output of a prompt that cannot run."""
        return RequestOutput(index, asked.text, None, "error", asked.error)

    def read(self, ended: Sequence[Ended]) -> list[RequestOutput]:
        """The outputs of prompts that ended, their texts decoded together."""
        answers = [Answer(Generation(one.request, shard=0, rows=(one.index,), sample=0), one.done) for one in ended]
        return [_output(one, record) for one, record in zip(ended, self._reader.records(answers), strict=True)]


def _output(one: Ended, record: JournalRecord) -> RequestOutput:
    asked, done = one.asked, one.done
    structured, error = asked.sampling.structured_outputs, None
    if record.error_code is not None:
        error = RowError(record.error_code, record.error_message or "")
    parsed, calls = None, record.extra.get("tool_calls")
    if error is None and structured is not None and structured.kind == "json":
        parsed = json.loads(record.response or "null")
    return RequestOutput(
        index=one.index,
        prompt=asked.text,
        text=record.response,
        finish_reason="tool_calls" if record.finish_reason == "tool_calls" else done.finish_reason,
        error=error,
        prompt_token_ids=tuple(one.request.prompt_token_ids),
        token_ids=done.token_ids,
        num_prompt_tokens=record.prompt_tokens,
        num_cached_tokens=record.cached_tokens,
        num_output_tokens=record.completion_tokens,
        reasoning=record.extra.get("reasoning"),
        tool_calls=None if calls is None else with_ids(calls, str(one.index), sample=0),
        parsed=parsed,
        logprobs=record.extra.get("logprobs"),
        prompt_logprobs=record.extra.get("prompt_logprobs"),
        cumulative_logprob=record.extra.get("cumulative_logprob"),
    )
