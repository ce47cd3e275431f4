"""From the values of a row to what is asked of the model: a conversation, made by templates or read from a column.

Knows the shapes in which messages and texts come; knows no models, tokens or sampling.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.errors import JobFileError, shown_value
from bulkrun.job.jobfile.message_calls import read_calls
from bulkrun.job.jobfile.prompt import ChatMessage, PromptSpec
from bulkrun.job.prompts.row_cut import RowCut
from bulkrun.job.prompts.templates import RowTemplate, unknown_column
from bulkrun.request import RowError

Message = dict[str, Any]
Conversation = list[Message]


class Ask(NamedTuple):
    """What a row asks. `raw`: the text is the prompt as it is, no chat template; `model` is what an OpenAI line says
    there; `continues`: whether the model goes on with the last message (None: as the job says); `cut`: how it has its
    own prompt cut; the rest are values of its own. Where there are `pairs` of texts they are all that it asks, and so
    are several `texts`, and `token_ids`.
    """

    messages: Conversation
    raw: bool = False
    sampling: Mapping[str, Any] = MappingProxyType({})
    template_kwargs: Mapping[str, Any] = MappingProxyType({})
    model: Any = None
    continues: bool | None = None
    pairs: tuple[tuple[str, str], ...] = ()
    texts: tuple[str, ...] = ()
    token_ids: list[int] | None = None
    cut: RowCut | None = None


# Types of content parts that are text, and where they have it: OpenAI's two endpoints name it each in its own way.
_TEXT_KEYS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
# Who speaks in a dataset of ShareGPT's form, {from, value}, which many on the hub have.
_SHAREGPT_ROLES = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SYSTEM_ROLES = ("system", "developer")  # the newer word for it
_SINGLE_BRACES = re.compile(r"\{\s*(\w+)\s*\}")
RowToAsk = Callable[[Mapping[str, Any]], Ask | RowError]
RowToConversation = Callable[[Mapping[str, Any]], Conversation | RowError]


class BadMessages(ValueError):
    """Why a value is not a conversation; the message names the message and part, not the column."""


def conversation_maker(spec: PromptSpec, columns: Sequence[str]) -> tuple[RowToAsk, list[str]]:
    """The function from a row to what it asks, and the columns that it reads, for a prompt section with a mapping.

    Raises JobFileError for a template that does not parse and for a column that is not there.
    """
    body, reads = _body_maker(spec, columns)
    makers = [body]
    if spec.system is not None:
        system, system_reads = _templated([({"role": "system"}, "prompt.system", spec.system)], columns)
        makers, reads = [system, body], reads + system_reads

    def ask(row: Mapping[str, Any]) -> Ask | RowError:
        messages: Conversation = []
        for make in makers:
            made = make(row)
            if isinstance(made, RowError):
                return made
            messages += made
        return Ask(messages)

    return ask, reads


def column_maker(
    key: str, name: str, columns: Sequence[str], read: Callable[[str, Any], Ask | RowError]
) -> tuple[RowToAsk, list[str]]:
    """The function from a row to what `read` finds in a column's cell (it is given the place in words, and the value),
    and the column, which `key` of the job file names. Raises JobFileError where it is not there."""
    if name not in columns:
        raise JobFileError([f"{key}: {unknown_column(name, columns)}"])
    return (lambda row: read(f"column {name!r}", row[name])), [name]


def _body_maker(spec: PromptSpec, columns: Sequence[str]) -> tuple[RowToConversation, list[str]]:
    if spec.template is not None:
        return _templated([({"role": "user"}, "prompt.template", spec.template)], columns)
    if isinstance(spec.messages, list):
        keyed = [
            (_head(m), f"prompt.messages.{index}.content", None if m.tool_calls and not m.content else m.content)
            for index, m in enumerate(spec.messages)
        ]
        return _templated(keyed, columns)
    key, name = ("prompt.messages", spec.messages) if spec.messages is not None else ("prompt.column", spec.column)
    assert name is not None, "a prompt section without a mapping is resolved from the columns first"
    if name not in columns:
        raise JobFileError([f"{key}: {unknown_column(name, columns)}"])
    read = _messages_of if spec.messages is not None else _text_of
    return (lambda row: read(name, row[name])), [name]


def no_column_used(spec: PromptSpec, columns: Sequence[str]) -> str:
    """What is wrong with templates that read nothing of a row: every row would ask the same."""
    key = "prompt.template" if spec.template is not None else "prompt.messages"
    texts = [spec.template or "", *(m.content for m in spec.messages or () if isinstance(m, ChatMessage))]
    single = [name for text in texts for name in _SINGLE_BRACES.findall(text) if name in columns]
    name = single[0] if single else next(iter(columns), "text")
    fix = f"write {{{{ {name} }}}} for {{{name}}}" if single else f"write {{{{ {name} }}}} where a row's value goes"
    return f"{key}: uses no column of the input, so every row would have the same prompt; {fix}"


def refuse_single_braces(key: str, source: str, columns: Sequence[str], reads: Sequence[str]) -> None:
    """Raise JobFileError for a template that reads nothing of a row and has the name of a column in single braces."""
    single = [name for name in _SINGLE_BRACES.findall(source) if name in columns]
    if single and not reads:
        raise JobFileError([f"{key}: uses no column of the input; write {{{{ {single[0]} }}}} for {{{single[0]}}}"])


def _head(message: ChatMessage) -> Message:
    """What is in a message beside its content."""
    calls = {"tool_calls": read_calls(message.tool_calls)} if message.tool_calls else {}
    answered = {} if message.tool_call_id is None else {"tool_call_id": message.tool_call_id}
    return {"role": message.role, **calls, **answered}


def _templated(
    keyed: Sequence[tuple[Message, str, str | None]], columns: Sequence[str]
) -> tuple[RowToConversation, list[str]]:
    """Messages whose contents are templates, or none: (what else is in it, key in the job file, source) each."""
    templates = [(head, None if source is None else RowTemplate(key, source, columns)) for head, key, source in keyed]

    def make(row: Mapping[str, Any]) -> Conversation | RowError:
        messages: Conversation = []
        for head, template in templates:
            content = None if template is None else template.render(row)
            if isinstance(content, RowError):
                return content
            messages.append({**head, "content": content})
        return messages

    return make, [name for _, template in templates if template is not None for name in template.reads]


def _text_of(column: str, value: Any) -> Conversation | RowError:
    if not isinstance(value, str):
        texts = isinstance(value, list) and all(isinstance(one, str) for one in value)
        fix = "; a list of texts has vectors of each with task: embed and prompt.text_lists: true" if texts else ""
        return RowError("bad_input", f"column {column!r}: {shown(value)} is not text{fix}")
    return [{"role": "user", "content": value}]


def _messages_of(column: str, value: Any) -> Conversation | RowError:
    """The messages in a column: a list of {role, content}, or of ShareGPT's {from, value}, or such a list as JSON text.

    Arrow's structs carry a null for each field that another row's messages have.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return RowError("bad_input", f"column {column!r}: {shown(value)} is not a JSON list of messages")
    else:
        value = without_nulls(value)
    try:
        return read_messages(list(map(_renamed, value)) if isinstance(value, list) else value)
    except BadMessages as problem:
        return RowError("bad_input", f"column {column!r}{problem}")


def _renamed(message: Any) -> Any:
    """A message of ShareGPT's form in the usual one; all else as it came."""
    if not isinstance(message, dict) or "role" in message or not {"from", "value"} <= message.keys():
        return message
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker.lower() not in _SHAREGPT_ROLES:
        raise BadMessages(f": a message is from {shown(speaker)}, which is none of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": _SHAREGPT_ROLES[speaker.lower()], "content": message["value"]}


def read_messages(value: Any) -> Conversation:
    """A list of {role, content} as it came; content is text, or a list of {type: text, text}, nothing else in them;
    an assistant's message may have `tool_calls`, whose arguments become mappings.

    Raises BadMessages, whose text goes on after the name of the place that held the list.
    """
    if not isinstance(value, list):
        raise BadMessages(f": {shown(value)} is not a list of messages")
    return [read_message(f", message {index}", message) for index, message in enumerate(value)]


def read_message(where: str, given: Any) -> Message:
    """One of such a list; `where` says in the text of BadMessages which one."""
    if not isinstance(given, dict):
        raise BadMessages(f"{where}: {shown(given)} is not {{role: text, content: text}}")
    message: Message = {key: part for key, part in given.items() if part is not None}
    _read_calls_of(message, where)
    if isinstance(message.get("content"), list):
        message["content"] = [_text_part(where, part) for part in message["content"]]
    elif "content" not in message and "refusal" in message:  # how OpenAI writes an answer that was none
        message["content"] = message.pop("refusal")
    is_content = isinstance(message.get("content"), str | list) or _only_calls(message)
    if not isinstance(message.get("role"), str) or not is_content:
        raise BadMessages(f"{where}: {shown(message)} is not {{role: text, content: text}}")
    return message


def _read_calls_of(message: Message, where: str) -> None:
    """Put calls into the form that templates read; a message that calls may say nothing beside."""
    if message.pop("function_call", None):
        raise BadMessages(f"{where}: function_call is not supported; write tool_calls")
    # An empty list of calls is none: templates that ask whether there is one would leave the content out.
    if not (calls := message.pop("tool_calls", None)):
        return
    if message.get("role") != "assistant":
        raise BadMessages(f"{where}: only an assistant calls tools, and the role is {shown(message.get('role'))}")
    try:
        message |= {"content": message.get("content"), "tool_calls": read_calls(calls)}
    except ValueError as problem:
        raise BadMessages(f"{where}: {problem}") from None


def _only_calls(message: Message) -> bool:
    return "tool_calls" in message and message["content"] is None


def asks_nothing(messages: Conversation) -> bool:
    """Whether there is nothing to answer. A system message asks only where it stands alone."""
    asking = [message for message in messages if message["role"] not in SYSTEM_ROLES] or messages
    return not any(text.strip() for message in asking for text in texts_of(message["content"]))


def texts_of(content: str | list[dict[str, str]] | None) -> list[str]:
    """The text of a content, or of each of its parts."""
    return [content] if isinstance(content, str) else [part["text"] for part in content or ()]


def _text_part(where: str, part: Any) -> dict[str, str]:
    """A part as chat templates know it; without what else came in it, as the nulls of Arrow's structs."""
    kind = part.get("type") if isinstance(part, dict) else None
    key = _TEXT_KEYS.get(kind) if isinstance(kind, str) else None
    if key is not None and isinstance(part.get(key), str):
        return {"type": "text", "text": part[key]}
    if isinstance(kind, str) and key is None:
        raise BadMessages(
            f"{where}: a content part of type {kind!r}; only text can be read, not images, audio or files"
        )
    raise BadMessages(f"{where}: content part {shown(part)} is not {{type: text, text: ...}}")


def shown(value: Any) -> str:
    """A value in a message: its kind and a short beginning, as a row may be huge."""
    if value is None:
        return "null"
    return shown_value(value)
