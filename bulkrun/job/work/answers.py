"""From completions to journal records: text, thoughts, calls, parsed values, log-probabilities; is it an answer?

An output that cannot be used as an answer becomes an error record that keeps the text: what the engine says (`runaway`,
`timeout`, ...), thoughts without an answer (`no_answer`), a structure that is not whole (`invalid_schema`), whatever
breaks the reading of it (`engine_error`). Decodes in batches. Knows no files, threads or engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bulkrun.data.types.json_types import as_unicode
from bulkrun.job.jobfile.thought_markers import CHANNELS
from bulkrun.job.outputs.channels import begun_head, split_channels
from bulkrun.job.outputs.logprobs import TokenTexts, column_value
from bulkrun.job.outputs.marker_decode import MarkerDecode
from bulkrun.job.outputs.output_text import Decode, Output, added_texts, output_texts, shared_length
from bulkrun.job.outputs.thoughts import Thoughts, span_of, split_thoughts
from bulkrun.job.outputs.tool_calls import MARKERS, split_calls
from bulkrun.job.plan.result_columns import PROMPT_TOKEN_IDS, TOKEN_IDS
from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.work.isolation import reason_of
from bulkrun.job.work.shard_work import Generation
from bulkrun.request import (
    Completion,
    FinishReason,
    RowError,
    SamplingParams,
    StructuredOutput,
    Thinking,
    ToolCalls,
    ToolFormat,
)

if TYPE_CHECKING:
    from bulkrun.job.outputs.bound_calls import BoundCallsParser
    from bulkrun.job.outputs.parsing import OutputParser

_PROMPT_END_TOKENS = 64  # a marker and the white space after it are fewer
_PARSERS = 256  # of a job whose rows bring schemas of their own, the latest


@dataclass(frozen=True)
class Answer:
    """A generation and how it ended."""

    generation: Generation
    completion: Completion

    @property
    def output(self) -> Output:
        """What the text is read from."""
        request = self.generation.request
        return Output(request.prompt_token_ids, self.completion, request.sampling.include_stop_str_in_output)


def _parser_of(column: pa.DataType | None, structured: StructuredOutput) -> OutputParser | BoundCallsParser:
    # jsonschema is slow to import, and few jobs have schemas
    from bulkrun.job.outputs.bound_calls import BoundCallsParser
    from bulkrun.job.outputs.parsing import OutputParser

    if structured.kind == "tool_calls":
        return BoundCallsParser(structured)
    return OutputParser(structured, column)


class AnswerReader:
    """Reads what the engine generated. `fields` are the extra result columns that the job asks for.

    Used by one thread at a time.
    """

    def __init__(self, decode: Decode, fields: Sequence[pa.Field] = ()) -> None:
        columns: dict[str, pa.DataType] = {field.name: field.type for field in fields}
        self._decode, self._columns = decode, frozenset(columns)
        self._decoders = {form: MarkerDecode(decode, markers) for form, markers in MARKERS.items()}
        self._tokens = TokenTexts(decode)
        make_parser = partial(_parser_of, columns.get("parsed"))
        self._parser: Callable[[StructuredOutput], OutputParser | BoundCallsParser] = lru_cache(_PARSERS)(make_parser)

    def records(self, answers: Sequence[Answer]) -> list[JournalRecord]:
        """One record per answer, in their order."""
        alike: dict[ToolFormat | None, list[int]] = {}
        for index, answer in enumerate(answers):
            alike.setdefault(_form_of(answer), []).append(index)
        texts: dict[int, str] = {}
        for form, indexes in alike.items():
            texts |= zip(indexes, self._texts([answers[index] for index in indexes], form), strict=True)
        return [self._record(answer, as_unicode(texts[index])) for index, answer in enumerate(answers)]

    def _texts(self, answers: Sequence[Answer], form: ToolFormat | None) -> list[str]:
        return output_texts(self._decode_of(form), [answer.output for answer in answers])

    def _decode_of(self, form: ToolFormat | None) -> Decode:
        """Texts in which a form is looked for show its markers."""
        return self._decode if form is None else self._decoders[form]

    def _record(self, answer: Answer, text: str) -> JournalRecord:
        done, generation = answer.completion, answer.generation
        try:
            response, extra, error = self._read(answer, text)
        except Exception as problem:  # one row's output must not end the thread that records everyone's
            logging.getLogger(__name__).warning("an output cannot be read", exc_info=True)
            response, extra = text, {}
            error = done.error or RowError("engine_error", f"the output cannot be read: {reason_of(problem)}")
        if error is not None and not response:
            response = None  # an empty text would look like an answer
        return JournalRecord(
            rows=generation.rows,
            sample=generation.sample,
            response=response,
            finish_reason=_finish_reason(done, extra),
            prompt_tokens=done.num_prompt_tokens or len(generation.request.prompt_token_ids),
            completion_tokens=done.num_output_tokens,
            error_code=error.code if error else None,
            error_message=error.message if error else None,
            extra={name: value for name, value in extra.items() if name in self._columns and value is not None},
            cached_tokens=done.num_cached_tokens,
        )

    def _read(self, answer: Answer, text: str) -> tuple[str | None, dict[str, Any], RowError | None]:
        """The response, the values of other columns, and why it is not an answer."""
        done, sampling = answer.completion, answer.generation.request.sampling
        extra = self._probabilities(done) | self._token_ids(answer)
        response: str | None = text
        error = done.error
        calls = _calls_of(answer)
        if _form_of(answer) == "harmony":
            is_ended = done.finish_reason == "stop" and not isinstance(done.stop_reason, str)
            goes_on = sampling.thinking is not None and sampling.thinking.begun == "answer"
            whole = text if goes_on else self._begun(answer) + text
            extra["reasoning"], response = split_channels(whole, is_ended=is_ended, is_answering=goes_on)
            error = error or _no_answer(response, done)
        elif sampling.thinking is not None:
            extra["reasoning"], response = self._split(answer, text, sampling.thinking)
            error = error or _no_answer(response, done)
        if sampling.structured_outputs is not None and error is None and response is not None:
            parser = self._parser(sampling.structured_outputs)
            extra["parsed"], error = parser.parse(response, done.finish_reason, done.progress)
        if calls is not None and error is None and response:
            response, found = split_calls(response, calls.format, calls.texts)
            extra["tool_calls"] = (found if calls.parallel else found[:1]) or None
        return response, extra, error

    def _probabilities(self, done: Completion) -> dict[str, Any]:
        values: dict[str, Any] = {"cumulative_logprob": done.cumulative_logprob}
        if "logprobs" in self._columns:
            values["logprobs"] = column_value(done.logprobs, self._tokens)
        if "prompt_logprobs" in self._columns:
            values["prompt_logprobs"] = column_value(done.prompt_logprobs, self._tokens)
        return values

    def _token_ids(self, answer: Answer) -> dict[str, list[int]]:
        if TOKEN_IDS not in self._columns:
            return {}
        prompt, written = answer.generation.request.prompt_token_ids, answer.completion.token_ids
        return {PROMPT_TOKEN_IDS: list(prompt), TOKEN_IDS: list(written)}

    def _begun(self, answer: Answer) -> str:
        """The head of the first message of channels, where it is in the prompt."""
        prompt = answer.generation.request.prompt_token_ids
        [prompt_end] = self._decode([prompt[-_PROMPT_END_TOKENS:]], skip_special_tokens=False)
        return begun_head(prompt_end)

    def _split(self, answer: Answer, text: str, thinking: Thinking) -> Thoughts:
        token_ids, prompt = answer.output.token_ids, answer.generation.request.prompt_token_ids
        [raw, prompt_end] = self._decode([token_ids, prompt[-_PROMPT_END_TOKENS:]], skip_special_tokens=False)
        begun = thinking.begun_by(prompt_end)
        if begun == "answer":
            return Thoughts(None, text)  # the template has ended the thoughts before they began, or the message had
        opens = raw.lstrip().startswith(thinking.start)
        # Markers that hold special tokens are not seen in the text, which may spell others.
        start_is_unseen, end_is_unseen = (raw.count(marker) > text.count(marker) for marker in thinking[:2])
        if (opens and start_is_unseen) or end_is_unseen:
            return self._split_at_tokens(answer, text, thinking if opens else thinking._replace(start=""))
        return split_thoughts(text, thinking, began_before=begun == "thoughts")

    def _split_at_tokens(self, answer: Answer, text: str, thinking: Thinking) -> Thoughts:
        """Split where the text, which may end before the tokens do (at a stop string), comes to the markers' tokens."""
        token_ids = answer.output.token_ids
        self._tokens.learn(token_ids)
        pieces = [self._tokens[token_id] for token_id in token_ids]
        start, end = span_of(thinking.start, pieces), span_of(thinking.end, pieces)
        begin = self._length(answer, text, start.stop) if start is not None else 0
        if end is None:
            return Thoughts(text[begin:].lstrip().rstrip("\r\n"), None)
        thoughts = text[begin : self._length(answer, text, end.start)].lstrip().rstrip("\r\n")
        return Thoughts(thoughts, text[self._length(answer, text, end.stop) :].lstrip("\r\n"))

    def _length(self, answer: Answer, text: str, num_tokens: int) -> int:
        """How much of an output's text its first tokens are."""
        token_ids = answer.output.token_ids[:num_tokens]
        decode = self._decode_of(_form_of(answer))
        [read] = added_texts(decode, [answer.generation.request.prompt_token_ids], [token_ids])
        return shared_length(text, as_unicode(read))


def _calls_of(answer: Answer) -> ToolCalls | None:
    """What calls the answer may have; another structure than that of calls has no room for them."""
    sampling: SamplingParams = answer.generation.request.sampling
    structured = sampling.structured_outputs
    return sampling.tool_calls if structured is None or structured.kind == "tool_calls" else None


def _form_of(answer: Answer) -> ToolFormat | None:
    """The form in which the answer is written, where it is read for one: that of its calls, or gpt-oss's channels."""
    thinking, calls = answer.generation.request.sampling.thinking, _calls_of(answer)
    if thinking is not None and thinking[:2] == CHANNELS:
        return "harmony"
    return None if calls is None else calls.format


def _finish_reason(done: Completion, extra: Mapping[str, Any]) -> FinishReason:
    """An answer that calls tools did not just stop."""
    return "tool_calls" if done.finish_reason == "stop" and extra.get("tool_calls") else done.finish_reason


def _no_answer(response: str | None, done: Completion) -> RowError | None:
    """Thoughts alone are not an answer, and neither is an answer that was cut before its first character."""
    if response or (response is not None and done.finish_reason == "stop"):
        return None
    return RowError(
        "no_answer",
        f"the output ended ({done.finish_reason}, {done.num_output_tokens} tokens) before its answer began; raise "
        "sampling.max_tokens, or give the thoughts fewer with sampling.thinking.max_tokens",
    )
