"""Outputs of gpt-oss, which are messages of several channels (OpenAI's harmony format): thoughts, calls, the answer.

    <|channel|>analysis<|message|>...<|end|>
    <|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{...}<|call|>
    <|start|>assistant<|channel|>final<|message|>...<|return|>

The prompt ends with the first `<|start|>assistant`. A message may name whom it is to before its channel too. Knows the
text of an output with its markers, and no tokens.
"""

from __future__ import annotations

import re

from bulkrun.job.outputs.call import Call, NoCall, after_space, call_of, json_at
from bulkrun.job.outputs.thoughts import Thoughts

OPENER = "<|channel|>commentary to=functions."
_END = "<|call|>"
# Where no message follows, the model has only spelled the marker: in code, or in an answer about such models.
_BETWEEN = re.compile(
    r"<\|(?:end|call|return)\|>(?=\s*(?:<\|(?:start|channel)\|>|to=functions\.|\Z))|(?=<\|start\|>assistant)"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAME = re.compile(r"([^\s<]+) <\|constrain\|>json<\|message\|>")


def split_channels(text: str, *, is_ended: bool, is_answering: bool = False) -> Thoughts:
    """An output in two: what it says in its channel analysis, and all else: the answer, what comes before, calls.

    A call is written in one way, whichever the model chose, for `read_harmony`. `is_ended`: the model ended the output
    itself, with a marker that no text shows; else its last message may be cut. `is_answering`: it begins in the middle
    of an answer, which the prompt began.
    """
    thoughts, rest, is_cut = list[str](), list[str](), False
    messages = _BETWEEN.split(text)
    if is_answering:
        rest.append(messages.pop(0))
    for number, message in enumerate(messages, 1):
        head, is_whole, content = message.partition("<|message|>")
        if not is_whole:
            is_cut = "<|" in head
            rest += [] if is_cut or not head.strip() else [head]  # the prompt may have begun the answer
        elif recipient := _RECIPIENT.search(head):
            end = _END if is_ended or number < len(messages) else ""
            rest.append(f"<|channel|>commentary to={recipient[1]} <|constrain|>json<|message|>{content}{end}")
        elif (channel := _CHANNEL.search(head)) and channel[1] == "analysis":
            thoughts.append(content.strip())
        else:
            rest.append(content.lstrip("\r\n"))
    response = None if not rest and (thoughts or is_cut) else "\n".join(rest)
    return Thoughts("\n".join(thoughts) if thoughts else None, response)


def begun_head(prompt_end: str) -> str:
    """The head of the message that a prompt has begun, empty where an output begins its own."""
    _, _, message = prompt_end.rpartition("<|start|>")
    _, begins, head = message.partition("<|channel|>")
    named, is_whole, _ = head.partition("<|message|>")
    return f"{begins}{named}{is_whole}"


def read_harmony(text: str, at: int) -> tuple[list[Call], int]:
    """One call in a text of `split_channels`, from its name on. Raises NoCall for one that is not whole.

    It may have no arguments where it has an end: one that is cut may have had some.
    """
    if (named := _NAME.match(text, at)) is None:
        raise NoCall
    at = after_space(text, named.end())
    arguments, at = ({}, at) if text.startswith(_END, at) else json_at(text, at)
    at = after_space(text, at)
    if at < len(text) and not text.startswith(_END, at):
        raise NoCall
    return [call_of(named[1], arguments)], min(len(text), at + len(_END))
