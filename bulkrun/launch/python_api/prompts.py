"""What a Python caller may ask: a text, token ids, vLLM's mappings, a conversation; and why a value is not a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.data.results.schema_check import check_schema
from bulkrun.data.types.json_types import is_unicode
from bulkrun.errors import UsageError, shown_value
from bulkrun.job.jobfile.template_kwargs import check_template_kwargs
from bulkrun.job.jobfile.tool_calls import bound_calls, needs_texts
from bulkrun.job.jobfile.tools import NO_OFFER, NONE, Offer, Tool, check_choice, check_tools, offered
from bulkrun.job.prompts.body_keys import ADD_PROMPT, CONTINUE
from bulkrun.job.prompts.continuation import why_not_continued, with_begun
from bulkrun.job.prompts.conversations import BadMessages, Conversation, asks_nothing, read_messages
from bulkrun.launch.python_api.prompt_stream import Asked
from bulkrun.request import RowError, SamplingParams, ToolFormat
from bulkrun.sandbox import TemplateFailed
from bulkrun.text.tokenizer import Tokenizer

Ask = Callable[[Any, SamplingParams, int], Asked]  # of whatever was given, with its parameters and its seed


def offer_of(tools: Sequence[Tool] | None, choice: Any) -> Offer:
    """The tools of a call, and what has to be called of them. Raises UsageError for what is none."""
    try:
        check_choice(choice)
        given = list(tools) if isinstance(tools, Sequence) else [] if tools is None else tools
        offer = offered(check_tools(given), choice)
        for function in offer.bound.get("functions", ()):
            check_schema(function["parameters"])
    except ValueError as problem:
        raise UsageError(f"tools, tool_choice: {problem}") from None
    return offer


def sampling_with(offer: Offer, sampling: SamplingParams) -> SamplingParams:
    """The sampling of prompts to which tools are offered. Raises UsageError where it has no room for calls."""
    calls, forms = sampling.tool_calls, get_args(ToolFormat)
    if calls is not None and calls.format not in forms:
        raise UsageError(f"tool_calls: {calls.format!r:.60} is not one of {', '.join(forms)}")
    if offer.tools and calls is not None and sampling.structured_outputs is not None:
        raise UsageError("tools: given together with structured_outputs, which has no room for calls")
    if not offer.tools:
        return replace(sampling, tool_calls=None) if offer.tool_calls == NONE else sampling
    if calls is not None and needs_texts(calls.format):
        offer = offer.with_texts()
        calls = calls._replace(texts=json.dumps(offer.texts))
        sampling = replace(sampling, tool_calls=calls)
    if not offer.bound:
        return sampling
    if calls is None:
        raise UsageError(
            "tool_choice: what has to be called has a form; give sampling's tool_calls another format than none"
        )
    return replace(sampling, structured_outputs=bound_calls(calls, offer.bound))


def check_continuation(asks: Any, continues: Any) -> None:
    """Raise UsageError for a call that wants the last message gone on with and another begun, as vLLM does."""
    for key, value in ((ADD_PROMPT, asks), (CONTINUE, continues)):
        if not isinstance(value, bool):
            raise UsageError(f"{key}: {value!r:.60} is not True or False")
    if asks and continues:
        raise UsageError(f"{CONTINUE}: needs {ADD_PROMPT}=False beside it, or another message would be begun")


def conversation_asker(
    tokenizer: Tokenizer,
    template_kwargs: Mapping[str, Any],
    offer: Offer = NO_OFFER,
    *,
    asks: bool = True,
    continues: bool = False,
) -> Ask:
    """What asks conversations through the model's chat template; not `asks`: that are whole, with their answers;
    `continues`: whose last message the model goes on with.

    Raises UsageError for values that no template can be given.
    """
    try:
        check_template_kwargs(template_kwargs)
    except ValueError as problem:
        raise UsageError(f"chat_template_kwargs: {problem}") from None
    renderer = tokenizer.chat_renderer()
    template_kwargs = {**template_kwargs, **offer.template_kwargs, ADD_PROMPT: asks, CONTINUE: continues}

    def ask(conversation: Any, sampling: SamplingParams, seed: int) -> Asked:
        try:
            messages = read_messages(conversation if isinstance(conversation, list) else _plain(conversation))
            if asks_nothing(messages):
                return Asked(None, None, sampling, seed, RowError("empty_prompt", "the prompt is empty"))
            if continues:
                sampling = _continuing(messages, sampling)
            text = renderer.render(messages, **template_kwargs)
        except (BadMessages, TemplateFailed) as problem:
            code = "bad_template" if isinstance(problem, TemplateFailed) else "bad_input"
            return Asked(None, None, sampling, seed, RowError(code, f"messages{problem}"))
        return _ask_plain(text, sampling, seed)

    return ask


def _continuing(messages: Conversation, sampling: SamplingParams) -> SamplingParams:
    """The sampling of a conversation whose last message is gone on with. Raises BadMessages where nothing can."""
    if (problem := why_not_continued(messages)) is not None:
        raise BadMessages(f": {CONTINUE}: {problem}")
    if sampling.thinking is None:
        return sampling
    return replace(sampling, thinking=with_begun(sampling.thinking, messages))


def ask_prompt(prompt: Any, sampling: SamplingParams, seed: int) -> Asked:
    """Ask a text, token ids, or one of vLLM's mappings, of which the ids count where there are both."""
    if not isinstance(prompt, Mapping):
        return _ask_plain(prompt, sampling, seed)
    given = {key: value for key, value in prompt.items() if value is not None}
    if given and given.keys() <= {"prompt", "prompt_token_ids"}:
        asked = _ask_plain(given.get("prompt_token_ids", given.get("prompt")), sampling, seed)
        return asked._replace(text=prompt["prompt"]) if len(given) == 2 else asked
    message = f"{shown_value(prompt)}: a mapping holds prompt or prompt_token_ids, and nothing else"
    return Asked(None, None, sampling, seed, RowError("bad_input", message))


def ask_pair(pair: Any, sampling: SamplingParams) -> Asked:
    """Ask a tuple of two texts."""
    texts = as_python(pair)
    both = [as_python(text) for text in texts] if isinstance(texts, tuple | list) else []
    if len(both) != 2 or not all(isinstance(text, str) for text in both):
        error = RowError("bad_input", f"{shown_value(pair)} is not a pair of texts: a tuple (text, text_pair)")
        return Asked(None, None, sampling, 0, error)
    second = error_of(both[1])
    error_of_second = None if second is None else RowError(second.code, f"text_pair: {second.message}")
    return Asked(both[0], None, sampling, 0, error_of(both[0]) or error_of_second, both[1])


def _ask_plain(prompt: Any, sampling: SamplingParams, seed: int) -> Asked:
    plain = as_python(prompt)
    if isinstance(plain, str):
        return Asked(plain, None, sampling, seed, error_of(plain))
    if isinstance(plain, Sequence) and not isinstance(plain, bytes | bytearray):
        token_ids = [as_python(token_id) for token_id in plain]
        if all(type(token_id) is int and token_id >= 0 for token_id in token_ids):
            return Asked(None, token_ids, sampling, seed)
    error = RowError("bad_input", f"{shown_value(prompt)} is neither a text nor a list of token ids")
    return Asked(None, None, sampling, seed, error)


def as_python(value: Any) -> Any:
    """What a value of pyarrow (`as_py`), NumPy, torch (`tolist`) or polars (`to_list`) is in Python; else as it is."""
    if isinstance(value, int | str | list):  # nearly always
        return value
    for name in ("as_py", "tolist", "to_list"):
        if convert := getattr(value, name, None):
            return convert()
    return value


def _plain(value: Any) -> Any:
    """A conversation of pyarrow, or of pandas, where lists are arrays: both give it the nulls of other rows' fields."""
    plain = as_python(value)
    if isinstance(plain, list | tuple):
        return without_nulls([_plain(inner) for inner in plain])
    return {key: _plain(inner) for key, inner in plain.items()} if isinstance(plain, dict) else plain


def error_of(text: str) -> RowError | None:
    """Why a text cannot be a prompt; None where it can."""
    if not text.strip():
        return RowError("empty_prompt", "the prompt is empty")
    if not is_unicode(text):
        return RowError("bad_input", "the prompt holds half a surrogate pair, which is not text")
    return None
