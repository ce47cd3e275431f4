"""Rows whose model goes on with the conversation's last message: which can be, and what that message has begun.

Names and meanings are vLLM's (`continue_final_message`). Knows messages and the markers of thoughts; knows no template.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.thinking import BEGUN
from bulkrun.job.prompts.body_keys import CONTINUE
from bulkrun.job.prompts.conversations import Ask, Conversation, RowToAsk, shown, texts_of
from bulkrun.request import RowError, Thinking


def with_continuation(ask: RowToAsk, spec: JobSpec) -> RowToAsk:
    """What asks, with `continues` told for each row: as it says itself, else as the job does.

    Where the model thinks, such a row has among its own values whether its last message is in thoughts or the answer.
    """
    job_continues, thinking = spec.prompt.continue_final_message, spec.sampling.to_params().thinking

    def ask_with_continuation(row: Mapping[str, Any]) -> Ask | RowError:
        asked = ask(row)
        if isinstance(asked, RowError):
            return asked
        continues = job_continues if asked.continues is None else asked.continues
        if asked.raw or not continues:
            return asked._replace(continues=False)
        if (problem := why_not_continued(asked.messages)) is not None:
            return RowError("bad_input", f"{CONTINUE}: {problem}")
        begun = {} if thinking is None else {BEGUN: with_begun(thinking, asked.messages).begun}
        return asked._replace(continues=True, sampling={**asked.sampling, **begun})

    return ask_with_continuation


def why_not_continued(messages: Conversation) -> str | None:
    """Why nothing can go on with a conversation's last message; None where it can."""
    if not messages:
        return "there is no message to continue"
    last = messages[-1]
    if last["role"] != "assistant":
        return f"the last message has the role {shown(last['role'])}, and only an assistant's can be continued"
    if "tool_calls" in last:
        return "the last message calls tools, and only a text can be continued"
    if not any(text.strip() for text in texts_of(last["content"])):
        return "the last message has no text to continue"
    return None


def with_begun(thinking: Thinking, messages: Conversation) -> Thinking:
    """How the model thinks, with what the last message has begun: thoughts that it has not ended, or its answer."""
    said = "\n".join(texts_of(messages[-1]["content"]))
    is_thinking = said.lstrip().startswith(thinking.start) and thinking.end not in said
    return thinking._replace(begun="thoughts" if is_thinking else "answer")
