"""Tool calls, prepared before anything runs: their format told from the chat template, grammars compiled once.

Knows how a job says it and what the text side knows of templates; knows no engine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import get_args

from bulkrun.data.results.schema_check import check_schema
from bulkrun.errors import JobFileError, ModelError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.thinking import ThinkingSpec
from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.job.jobfile.tools import AUTO, NONE, offered
from bulkrun.job.prompts.chat_source import named_template
from bulkrun.job.prompts.detect import detected_job
from bulkrun.request import ToolFormat
from bulkrun.sandbox import TemplateFailed
from bulkrun.text.grammar import check_grammar
from bulkrun.text.tokenizer import Tokenizer
from bulkrun.text.tool_format import tool_format_of

_FORMATS = (
    f"set sampling.tool_calls.format: {', '.join(get_args(ToolFormat))}, or none, which leaves calls in the response"
)

_THINK_FIRST = ("harmony", "cohere")

_PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "A probe.", "parameters": {"type": "object", "properties": {}}},
}
_ASKED = {"role": "user", "content": "Hello"}
_PROBE_CHATS = ([_ASKED], [{"role": "system", "content": "Be kind."}, _ASKED])


def with_tool_format(spec: JobSpec, tokenizer: Tokenizer) -> JobSpec:
    """The spec with the format of tool calls told from its chat template, where it offers tools or names no format.

    Where its models think in markers of their own before they call, thoughts get a column. Raises JobFileError where
    the template does not tell, or cannot be read.
    """
    calls = spec.sampling.tool_calls
    if calls is None and spec.prompt.tools is not None:
        calls = ToolCallsSpec()
    if calls is None:
        return spec
    tool_format = _told_format(spec, tokenizer) if calls.format == "auto" else calls.format
    thinks = tool_format in _THINK_FIRST and spec.sampling.thinking is None
    implied = {"thinking": ThinkingSpec()} if thinks else {}
    return spec.with_keys(sampling={"tool_calls": calls.model_copy(update={"format": tool_format}), **implied})


def _told_format(spec: JobSpec, tokenizer: Tokenizer) -> ToolFormat:
    source = _source(spec, tokenizer)
    tool_format = None if source is None else tool_format_of(source)
    if tool_format is None:
        why = (
            "there is no chat template" if source is None else "the chat template writes none of the formats known here"
        )
        raise JobFileError([f"sampling.tool_calls: {why}; {_FORMATS}"])
    return tool_format


def check_calls(spec: JobSpec) -> None:
    """Raise JobFileError where a job's tools have to be called that are not there, or have impossible parameters."""
    tools, choice = spec.prompt.tools, spec.prompt.tool_choice
    if not isinstance(tools, list) or choice in (AUTO, NONE):
        return
    try:
        offer = offered(tools, choice)
    except ValueError as problem:
        raise JobFileError([f"prompt.tool_choice: {problem}"]) from None
    assert spec.sampling.tool_calls is not None, "a job whose tools have to be called has a format for them"
    wanted = (offer.with_texts() if spec.sampling.tool_calls.needs_texts else offer).bound
    for function in wanted["functions"]:
        bound = spec.sampling.to_params({"tool_calls": {**wanted, "functions": [function]}}).structured_outputs
        assert bound is not None, "that is what has to be called"
        try:
            check_schema(function["parameters"])
            check_grammar(bound)
        except ValueError as problem:
            raise JobFileError([f"prompt.tools: function {function['name']!r}: {problem}"]) from None


def warn_of_hidden_tools(spec: JobSpec, tokenizer: Tokenizer) -> None:
    """Say so where the chat template would not show a job's tools, and nothing else tells the model of them."""
    source = _source(spec, tokenizer)
    has_choice = spec.prompt.tools is not None and spec.prompt.tool_choice == AUTO
    if has_choice and source is not None and not _shows_tools(spec, tokenizer, source):
        logging.getLogger(__name__).warning(
            "prompt.tools: the chat template does not show tools to the model, so that it cannot know of them; name "
            "one that does in prompt.chat_template, or tell of them in the messages"
        )


def _shows_tools(spec: JobSpec, tokenizer: Tokenizer, source: str) -> bool:
    """Whether tools make a difference to what a template writes; of one that fails its rows tell."""
    without = spec.prompt.chat_template_kwargs
    given = {**without, "tools": spec.prompt.tools if isinstance(spec.prompt.tools, list) else [_PROBE]}
    try:
        render = tokenizer.chat_renderer(source).render
        return any(render(chat, **given) != render(chat, **without) for chat in _PROBE_CHATS)
    except (ModelError, TemplateFailed):
        return True


def warn_of_unoffered_tools(spec: JobSpec, columns: Sequence[str]) -> None:
    """Say so where the input has tools beside its conversations, as datasets for tuning do, and nobody offers them."""
    has_tools = spec.generates and spec.prompt.tools is None and "tools" in columns
    if has_tools and detected_job(spec, columns).prompt.messages is not None:
        logging.getLogger(__name__).warning(
            "the input has a column 'tools', which no prompt shows; prompt.tools: tools offers them to the model"
        )


def _source(spec: JobSpec, tokenizer: Tokenizer) -> str | None:
    if spec.prompt.chat_template == "none":
        return None
    return tokenizer.chat_template if spec.prompt.chat_template == "auto" else named_template(spec.prompt)
