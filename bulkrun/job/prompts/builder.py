"""Rows to prompts: the job's prompt section applied to record batches, which then go to the tokenizer off this thread.

Every row comes out as exactly one `Prompt` or one `RowError`, in order. What a row asks is read by `conversations` and
`openai_batch`, a chat template makes a text of it, and `encoder` token ids of that. What is embedded is plain text with
`embedding.prompt` before it; a conversation that is judged asks for no answer. Knows the text side only as the protocol
`TextCodec`, and nothing of shards or order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

from bulkrun.data.inputs.batch import InputBatch
from bulkrun.data.inputs.python_rows import python_rows, with_short_floats, with_text
from bulkrun.data.storage.paths import user_path
from bulkrun.data.types.json_types import NOT_UNICODE, is_unicode
from bulkrun.errors import JobFileError, ModelError
from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.body_keys import CONTINUE
from bulkrun.job.prompts.chat_source import named_template
from bulkrun.job.prompts.continuation import with_continuation
from bulkrun.job.prompts.conversations import (
    SYSTEM_ROLES,
    Ask,
    RowToAsk,
    asks_nothing,
    conversation_maker,
    no_column_used,
    refuse_single_braces,
)
from bulkrun.job.prompts.detect import detected_job, has_mapping
from bulkrun.job.prompts.encoder import Prompt, PromptEncoder, RenderedPrompt
from bulkrun.job.prompts.fit import PromptFrame
from bulkrun.job.prompts.offers import with_tools
from bulkrun.job.prompts.openai_batch import batch_maker
from bulkrun.job.prompts.overrides import NO_OUTPUT, Overrides
from bulkrun.job.prompts.row_adapter import with_adapters
from bulkrun.job.prompts.row_cut import RowCut
from bulkrun.job.prompts.second_text import SecondText
from bulkrun.job.prompts.text_codec import ChatRenderer, TextCodec
from bulkrun.job.prompts.text_lists import list_maker
from bulkrun.job.prompts.token_lists import token_maker
from bulkrun.request import RowError
from bulkrun.sandbox import TemplateFailed

TOKENIZE_THREADS = 2
BATCHES_AHEAD = 4
CHARACTERS_AHEAD = 4 * 2**20  # in all batches that wait: token ids take some 10 to 40 bytes for each
_JUDGED = {"add_generation_prompt": False}  # what a chat template is told of conversations that are whole


class PromptBuilder:
    """Builds the prompts of one job.

    `columns` are the input's column names; where the job does not say how a row becomes a prompt, they tell. Raises
    JobFileError before any row for a template that does not parse, a column that is not there or columns that do not
    tell, and ModelError for a chat template that does not parse.
    """

    def __init__(self, spec: JobSpec, columns: Sequence[str], text: TextCodec) -> None:
        self._text = text
        spec = detected_job(spec, columns)
        if has_mapping(spec.prompt):
            made = _maker_of(spec.prompt)(spec.prompt, columns)
            calls = spec.sampling.tool_calls
            needs_texts = calls is not None and calls.needs_texts
            self._ask, self._reads = with_tools(made, spec.prompt, columns, needs_texts=needs_texts)
        else:
            assert spec.input.id is not None, "custom_id, where the job names no other"
            self._ask, self._reads = batch_maker(spec, columns, spec.input.id)
        self._ask, self._reads = with_adapters((with_continuation(self._ask, spec), self._reads), spec, columns)
        self._needs_chat = not has_mapping(spec.prompt)  # a batch may hold conversations and plain texts
        self._num_job_messages = 0 if spec.prompt.system is None else 1
        self._before = spec.embedding.prompt or ""
        self._overrides = Overrides(spec.sampling, columns)
        self._generates = spec.generates
        self._second = None if spec.prompt.text_pair is None else SecondText(spec.prompt.text_pair, columns)
        if self._second is not None:
            refuse_single_braces("prompt.template", spec.prompt.template or "", columns, self._reads)
        self._encoder = PromptEncoder(text, of_pairs=spec.of_pairs, several=spec.several or "text")
        self._of_pairs = spec.of_pairs
        second_reads = [] if self._second is None else self._second.reads
        self._reads = list(dict.fromkeys([*self._reads, *second_reads, *self._overrides.reads]))
        if not self._reads:
            raise JobFileError([no_column_used(spec.prompt, columns)])
        is_conversation = spec.generates or spec.prompt.messages is not None
        self._chat = _chat_renderer(spec.prompt, text) if is_conversation else None
        self._template_kwargs = spec.prompt.chat_template_kwargs | ({} if spec.generates else _JUDGED)
        if self._chat is None:
            _refuse_chat(spec)

    @property
    def reads(self) -> list[str]:
        """The input columns that prompts and per-row sampling need."""
        return self._reads

    def build(self, batch: InputBatch) -> list[Prompt | RowError]:
        """One prompt or error per row of `batch`."""
        return self._encoder.encode(self.render(batch))

    def stream(self, batches: Iterable[InputBatch]) -> Iterator[tuple[InputBatch, list[Prompt | RowError]]]:
        """The prompts of many batches, in order: rendered here, tokenized on other threads a few batches ahead.

        A batch of long texts comes in several pieces.
        """
        waiting: deque[tuple[InputBatch, int, Future[list[Prompt | RowError]]]] = deque()
        with ThreadPoolExecutor(TOKENIZE_THREADS, "tokenize") as pool:
            try:
                for batch, rendered in chain.from_iterable(map(self._in_pieces, batches)):
                    waiting.append((batch, _characters(rendered), pool.submit(self._encoder.encode, rendered)))
                    while len(waiting) > BATCHES_AHEAD or sum(size for _, size, _ in waiting) > CHARACTERS_AHEAD:
                        ready, _, future = waiting.popleft()
                        yield ready, future.result()
                for ready, _, future in waiting:
                    yield ready, future.result()
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _in_pieces(self, batch: InputBatch) -> Iterator[tuple[InputBatch, list[RenderedPrompt | RowError]]]:
        """A batch with its prompt texts, in pieces of as many characters as may wait, or of one row.

        Texts may be much longer than their input: a query is there once for each of its documents.
        """
        rendered, start = self.render(batch), 0
        for end in [*_ends_of_pieces(rendered), len(rendered)]:
            yield batch.slice(start, end - start), rendered[start:end]
            start = end

    def render(self, batch: InputBatch) -> list[RenderedPrompt | RowError]:
        """The prompt texts of a batch."""
        texts, not_text = with_text(batch.rows.select(self._reads))
        rows, unreadable = python_rows(with_short_floats(texts))
        errors = unreadable | not_text | batch.errors
        return [errors.get(index) or self._render_row(row) for index, row in enumerate(rows)]

    def _render_row(self, row: Mapping[str, Any]) -> RenderedPrompt | RowError:
        ask = self._ask(row)
        if isinstance(ask, RowError):
            return ask
        if ask.pairs and not self._of_pairs:  # the model reads one text at a time
            return self._render_texts([text for pair in ask.pairs for text in pair], ask.cut)
        if ask.pairs:
            return RenderedPrompt("", NO_OUTPUT, raw=True, frame=PromptFrame, pairs=ask.pairs, cut=ask.cut)
        if ask.texts:
            return self._render_texts(ask.texts, ask.cut)
        sampling = self._overrides.of_row(row, ask.sampling) if self._generates else NO_OUTPUT
        if isinstance(sampling, RowError):
            return sampling
        if ask.token_ids is not None:
            return RenderedPrompt("", sampling, raw=True, frame=PromptFrame, token_ids=ask.token_ids, cut=ask.cut)
        if asks_nothing(ask.messages[self._num_job_messages :]):  # the job's system message is in every row
            return RowError("empty_prompt", "the prompt is empty")
        text = self._prompt_text(ask)
        if isinstance(text, RowError):
            return text
        if not is_unicode(text):
            return RowError("bad_input", f"the prompt holds {NOT_UNICODE}")
        second = None if self._second is None else self._second.render(row)
        if isinstance(second, RowError):
            return second
        pairs = () if second is None else ((text, second),)
        return RenderedPrompt(text, sampling, self._is_raw(ask), partial(self._frame, ask), pairs, cut=ask.cut)

    def _render_texts(self, texts: Sequence[str], cut: RowCut | None) -> RenderedPrompt | RowError:
        """A row of several texts, each as one that is embedded alone.

        What stands around a text is the same for all: a batch of short ones has hundreds of thousands of them.
        """
        frame = partial(self._frame, Ask([{"role": "user", "content": ""}], raw=True))
        made = [RenderedPrompt(self._before + text, NO_OUTPUT, raw=True, frame=frame, cut=cut) for text in texts]
        return RenderedPrompt("", NO_OUTPUT, raw=True, frame=PromptFrame, texts=tuple(made))

    def _is_raw(self, ask: Ask) -> bool:
        return ask.raw or self._chat is None

    def _frame(self, ask: Ask) -> PromptFrame:
        """The token ids around a conversation, found by building two of different texts.

        They end before the first message that is not a system message: that is what remains before a conversation that
        is cut at its start. The message that the model goes on with is behind it.
        """
        texts = (index for index, message in enumerate(ask.messages) if message["role"] not in SYSTEM_ROLES)
        first = next(texts, len(ask.messages) - 1)
        *system, text = ask.messages[: first + 1]
        begun = ask.messages[-1:] if ask.continues and len(ask.messages) > first + 1 else []
        chats = [[*system, {**text, "content": probe}, *begun] for probe in "ab"]
        probes = [self._prompt_text(ask._replace(messages=chat)) for chat in chats]
        if any(isinstance(probe, RowError) for probe in probes):
            return PromptFrame()
        one, other = self._text.encode_batch([str(probe) for probe in probes], add_special_tokens=self._is_raw(ask))
        return PromptFrame.between(one, other)

    def _prompt_text(self, ask: Ask) -> str | RowError:
        if self._chat is None and not ask.raw and self._needs_chat:
            return RowError(
                "bad_input",
                "a conversation needs a chat template: the model brings none, or prompt.chat_template is none",
            )
        if self._chat is None or ask.raw:
            return self._before + "\n\n".join(message["content"] for message in ask.messages)
        options = {**self._template_kwargs, **ask.template_kwargs, **({CONTINUE: True} if ask.continues else {})}
        try:
            return self._chat.render(ask.messages, **options)
        except TemplateFailed as problem:
            return RowError("bad_template", f"chat template: {problem}")


def _maker_of(prompt: PromptSpec) -> Callable[[PromptSpec, Sequence[str]], tuple[RowToAsk, list[str]]]:
    if prompt.token_ids is not None:
        return token_maker
    return list_maker if prompt.text_lists else conversation_maker


def _characters(rendered: Sequence[RenderedPrompt | RowError]) -> int:
    return sum(map(_size, rendered))


def _size(prompt: RenderedPrompt | RowError) -> int:
    return prompt.size if isinstance(prompt, RenderedPrompt) else 0


def _ends_of_pieces(rendered: Sequence[RenderedPrompt | RowError]) -> Iterator[int]:
    """Where each piece but the last one ends."""
    characters = 0
    for row, size in enumerate(map(_size, rendered)):
        if characters and characters + size > CHARACTERS_AHEAD:
            yield row
            characters = 0
        characters += size


def _refuse_chat(spec: JobSpec) -> None:
    """Raise JobFileError where a job without a chat template counts on one."""
    nothing = f"the model {spec.model!r} has no chat template"
    if spec.prompt.messages is not None:
        fix = "name one in prompt.chat_template, or use prompt.template or prompt.column"
        raise JobFileError([f"prompt.messages: {nothing}; {fix}"])
    fix = "leave them out, or name one in prompt.chat_template"
    if spec.prompt.chat_template_kwargs:
        raise JobFileError([f"prompt.chat_template_kwargs: {nothing} to read them; {fix}"])
    if spec.prompt.tools is not None:
        raise JobFileError([f"prompt.tools: {nothing} to show them; {fix}"])
    if spec.prompt.continue_final_message:
        raise JobFileError([f"prompt.{CONTINUE}: {nothing} to write messages; name one in prompt.chat_template"])


def _chat_renderer(spec: PromptSpec, text: TextCodec) -> ChatRenderer | None:
    """The chat template to use: None means that the text is the prompt as it is."""
    if spec.chat_template == "none" or (spec.chat_template == "auto" and not text.has_chat_template):
        return None
    if spec.chat_template == "auto":
        return text.chat_renderer()
    try:
        return text.chat_renderer(named_template(spec), name=str(user_path(spec.chat_template)))
    except ModelError as error:
        raise JobFileError([f"prompt.chat_template: {error}"]) from None
