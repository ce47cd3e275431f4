"""Rows to prompts: the job's prompt section applied to record batches, then tokenized in batches off this thread.

Every row comes out as exactly one `Prompt` or one `RowError`, in order. Chat-rendered text is tokenized as it is (the
template wrote the special tokens), plain text with the model's special tokens (BOS). Knows the text side only as the
protocol `TextCodec`, and nothing of shards or order.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bulkrun.data.batch import InputBatch
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.spec import JobSpec, PromptSpec
from bulkrun.job.prompts.fit import PromptFrame
from bulkrun.job.prompts.overrides import Overrides, RowSampling
from bulkrun.job.prompts.templates import RowTemplate, unknown_column
from bulkrun.request import RowError
from bulkrun.sandbox import TemplateFailed

TOKENIZE_THREADS = 2
BATCHES_AHEAD = 4

Message = dict[str, Any]
Conversation = list[Message]
RowToConversation = Callable[[Mapping[str, Any]], Conversation | RowError]


class ChatRenderer(Protocol):
    """A compiled chat template."""

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt text with the generation prompt; raises bulkrun.sandbox.TemplateFailed."""


class TextCodec(Protocol):
    """What planning needs of a tokenizer; `bulkrun.text.tokenizer.Tokenizer` is the real one."""

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template."""

    def chat_renderer(self, source: str | None = None, name: str = ...) -> ChatRenderer:
        """The model's chat template, or another given by its source."""

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The token ids of each text; releases the GIL."""


class Prompt(NamedTuple):
    """What a row asks: token ids, and its sampling."""

    token_ids: list[int]
    sampling: RowSampling


class RenderedPrompt(NamedTuple):
    """A prompt as text, not tokenized yet."""

    text: str
    sampling: RowSampling


class PromptBuilder:
    """Builds the prompts of one job.

    `columns` are the input's column names. Raises JobFileError before any row for a template that does not parse or
    a column that is not there, and ModelError for a chat template that does not parse.
    """

    def __init__(self, spec: JobSpec, columns: Sequence[str], text: TextCodec) -> None:
        self._text = text
        self._conversation, self._reads = _conversation_maker(spec.prompt, columns)
        self._overrides = Overrides(spec.sampling, columns)
        self._reads = list(dict.fromkeys([*self._reads, *self._overrides.reads]))
        self._chat = _chat_renderer(spec.prompt, text)
        if self._chat is None and spec.prompt.messages is not None:
            raise JobFileError(
                [
                    f"prompt.messages: the model {spec.model!r} has no chat template; name one in "
                    "prompt.chat_template, or use prompt.template or prompt.column"
                ]
            )

    @property
    def reads(self) -> list[str]:
        """The input columns that prompts and per-row sampling need."""
        return self._reads

    def frame(self) -> PromptFrame:
        """The token ids around every prompt, found by building two with different contents."""
        probes = [self._prompt_text([{"role": "user", "content": content}]) for content in ("a", "b")]
        if any(isinstance(probe, RowError) for probe in probes):
            return PromptFrame()
        one, other = self._text.encode_batch([str(probe) for probe in probes], add_special_tokens=self._chat is None)
        return PromptFrame.between(one, other)

    def build(self, batch: InputBatch) -> list[Prompt | RowError]:
        """One prompt or error per row of `batch`."""
        return self.encode(self.render(batch))

    def stream(self, batches: Iterable[InputBatch]) -> Iterator[tuple[InputBatch, list[Prompt | RowError]]]:
        """The prompts of many batches, in order: rendered here, tokenized on other threads a few batches ahead."""
        waiting: deque[tuple[InputBatch, Future[list[Prompt | RowError]]]] = deque()
        with ThreadPoolExecutor(TOKENIZE_THREADS, "tokenize") as pool:
            try:
                for batch in batches:
                    waiting.append((batch, pool.submit(self.encode, self.render(batch))))
                    if len(waiting) > BATCHES_AHEAD:
                        ready, future = waiting.popleft()
                        yield ready, future.result()
                for ready, future in waiting:
                    yield ready, future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def render(self, batch: InputBatch) -> list[RenderedPrompt | RowError]:
        """The prompt texts of a batch."""
        rows = batch.rows.select(self._reads).to_pylist() if self._reads else [{}] * batch.rows.num_rows
        return [batch.errors.get(index) or self._render_row(row) for index, row in enumerate(rows)]

    def encode(self, rendered: Sequence[RenderedPrompt | RowError]) -> list[Prompt | RowError]:
        """Tokenize the texts of one batch in one call."""
        texts = [prompt.text for prompt in rendered if isinstance(prompt, RenderedPrompt)]
        ids = iter(self._text.encode_batch(texts, add_special_tokens=self._chat is None))
        return [_tokenized(prompt, next(ids)) if isinstance(prompt, RenderedPrompt) else prompt for prompt in rendered]

    def _render_row(self, row: Mapping[str, Any]) -> RenderedPrompt | RowError:
        sampling = self._overrides.of_row(row)
        if isinstance(sampling, RowError):
            return sampling
        messages = self._conversation(row)
        if isinstance(messages, RowError):
            return messages
        if not any(message["content"].strip() for message in messages if message["role"] != "system"):
            return RowError("empty_prompt", "the prompt is empty")
        text = self._prompt_text(messages)
        if isinstance(text, RowError):
            return text
        if not _is_unicode(text):
            return RowError("bad_input", "the prompt holds half a surrogate pair (\\ud800-\\udfff), which is not text")
        return RenderedPrompt(text, sampling)

    def _prompt_text(self, messages: Conversation) -> str | RowError:
        if self._chat is None:
            return "\n\n".join(message["content"] for message in messages)
        try:
            return self._chat.render(messages)
        except TemplateFailed as problem:
            return RowError("bad_template", f"chat template: {problem}")


def _tokenized(prompt: RenderedPrompt, token_ids: list[int]) -> Prompt | RowError:
    if not token_ids:
        return RowError("empty_prompt", "the prompt has no tokens")
    return Prompt(token_ids, prompt.sampling)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _chat_renderer(spec: PromptSpec, text: TextCodec) -> ChatRenderer | None:
    """The chat template to use: None means that the text is the prompt as it is."""
    if spec.chat_template == "none" or (spec.chat_template == "auto" and not text.has_chat_template):
        return None
    if spec.chat_template == "auto":
        return text.chat_renderer()
    path = Path(spec.chat_template)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else problem
        raise JobFileError([f"prompt.chat_template: cannot read {spec.chat_template!r}: {reason}"]) from None
    return text.chat_renderer(source, name=str(path))


def _conversation_maker(spec: PromptSpec, columns: Sequence[str]) -> tuple[RowToConversation, list[str]]:
    """The function from a row to its messages, and the columns that it reads."""
    make, reads = _body_maker(spec, columns)
    if spec.system is None:
        return make, reads
    system, system_reads = _templated([("system", "prompt.system", spec.system)], columns)

    def with_system(row: Mapping[str, Any]) -> Conversation | RowError:
        first = system(row)
        rest = make(row)
        if isinstance(first, RowError) or isinstance(rest, RowError):
            return first if isinstance(first, RowError) else rest
        return first + rest

    return with_system, reads + system_reads


def _body_maker(spec: PromptSpec, columns: Sequence[str]) -> tuple[RowToConversation, list[str]]:
    if spec.template is not None:
        return _templated([("user", "prompt.template", spec.template)], columns)
    if isinstance(spec.messages, list):
        keyed = [(m.role, f"prompt.messages.{index}.content", m.content) for index, m in enumerate(spec.messages)]
        return _templated(keyed, columns)
    key, name = ("prompt.messages", spec.messages) if spec.messages is not None else ("prompt.column", spec.column)
    assert name is not None
    if name not in columns:
        raise JobFileError([f"{key}: {unknown_column(name, columns)}"])
    read = _messages_of if spec.messages is not None else _text_of
    return (lambda row: read(name, row[name])), [name]


def _templated(keyed: Sequence[tuple[str, str, str]], columns: Sequence[str]) -> tuple[RowToConversation, list[str]]:
    """Messages whose contents are templates: (role, key in the job file, source) each."""
    templates = [(role, RowTemplate(key, source, columns)) for role, key, source in keyed]

    def make(row: Mapping[str, Any]) -> Conversation | RowError:
        messages: Conversation = []
        for role, template in templates:
            content = template.render(row)
            if isinstance(content, RowError):
                return content
            messages.append({"role": role, "content": content})
        return messages

    return make, [name for _, template in templates for name in template.reads]


def _text_of(column: str, value: Any) -> Conversation | RowError:
    if not isinstance(value, str):
        return RowError("bad_input", f"column {column!r}: {_shown(value)} is not text")
    return [{"role": "user", "content": value}]


def _messages_of(column: str, value: Any) -> Conversation | RowError:
    """The messages in a column: a list of {role, content}, or such a list as JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return RowError("bad_input", f"column {column!r}: {_shown(value)} is not a JSON list of messages")
    if not isinstance(value, list):
        return RowError("bad_input", f"column {column!r}: {_shown(value)} is not a list of messages")
    for index, message in enumerate(value):
        if not _is_message(message):
            where = f"column {column!r}, message {index}"
            return RowError("bad_input", f"{where}: {_shown(message)} is not {{role: text, content: text}}")
    # Arrow's structs carry a null for each field that another row's messages have.
    return [{key: part for key, part in message.items() if part is not None} for message in value]


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)
    )


def _shown(value: Any) -> str:
    """A value in a message: its kind and a short beginning, as a row may be huge."""
    if value is None:
        return "null"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
