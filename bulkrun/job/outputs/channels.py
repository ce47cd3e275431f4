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
_BETWEEN = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_NAME = re.compile(r"([^\s<]+) <\|constrain\|>json<\|message\|>")


def split_channels(text: str) -> Thoughts:
    """An output in two: what it says in its channel analysis, and all else: the answer, what comes before, calls.

    A call is written in one way, whichever the model chose, for `read_harmony`.
    """
    thoughts, rest, is_cut = list[str](), list[str](), False
    messages = _BETWEEN.split(text)
    for number, message in enumerate(messages, 1):
        head, is_whole, content = message.partition("<|message|>")
        if not is_whole:
            is_cut = "<|" in head
            rest += [] if is_cut or not head.strip() else [head]  # the prompt may have begun the answer
        elif recipient := _RECIPIENT.search(head):
            end = "<|call|>" if number < len(messages) else ""  # the last one may be cut
            rest.append(f"<|channel|>commentary to={recipient[1]} <|constrain|>json<|message|>{content}{end}")
        elif (channel := _CHANNEL.search(head)) and channel[1] == "analysis":
            thoughts.append(content.strip())
        else:
            rest.append(content.strip("\r\n"))
    response = None if not rest and (thoughts or is_cut) else "\n".join(rest)
    return Thoughts("\n".join(thoughts) if thoughts else None, response)


def read_harmony(text: str, at: int) -> tuple[list[Call], int]:
    """One call in a text of `split_channels`, from its name on. Raises NoCall for one that is not whole."""
    if (named := _NAME.match(text, at)) is None:
        raise NoCall
    at = after_space(text, named.end())
    arguments, at = ({}, at) if _ends(text, at) else json_at(text, at)
    at = after_space(text, at)
    if not _ends(text, at):
        raise NoCall
    return [call_of(named[1], arguments)], at + len("<|call|>")


def _ends(text: str, at: int) -> bool:
    return at == len(text) or text.startswith("<|call|>", at)
