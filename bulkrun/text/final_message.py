"""Where a conversation's last message ends in what a chat template writes, for a model that goes on with it.

A mark goes behind the message's text before the template sees it, and the prompt ends where the mark comes out: what
the template writes behind a message (the end of a turn) is left out, what it writes before (a header, thoughts) stays.
The prompts are those of `transformers`' `continue_final_message`.
"""

from __future__ import annotations

from bulkrun.sandbox import TemplateFailed
from bulkrun.text.content_form import Message

_MARK = "THE-MODEL-GOES-ON-HERE"
_SPACE = " "  # behind the mark: a template that trims texts takes it away


def with_mark(message: Message) -> Message:
    """The message with the mark behind its text, or behind the last of its text parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK + _SPACE}
    *before, last = content
    return {**message, "content": [*before, {**last, "text": last["text"] + _MARK + _SPACE}]}


def up_to_mark(rendered: str, message: Message) -> str:
    """The prompt that ends with the text of `message`, without the white space at its end where the template trims.

    Raises TemplateFailed where the template does not write that text as it is.
    """
    at = rendered.rfind(_MARK)
    text, content = rendered[: max(at, 0)], message["content"]
    said = content if isinstance(content, str) else content[-1]["text"]
    if at < 0 or not text.rstrip().endswith(said.strip()):
        raise TemplateFailed(
            "continue_final_message: the template leaves out or changes some of the last message's text, so that it "
            "cannot be continued"
        )
    return text if rendered.startswith(_SPACE, at + len(_MARK)) else text.rstrip()
