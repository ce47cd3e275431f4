"""`sampling.thinking`: how a reasoning model marks its thoughts, and how many tokens they may have."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from bulkrun.job.jobfile.section import Section
from bulkrun.request import STRUCTURE_BOUNDS, Thinking

# Of a row's own values: what the message that is continued has begun, and how many tokens its thoughts may have.
BEGUN, BUDGET = "begun", "thinking_token_budget"
_FIELDS = {BEGUN: "begun", BUDGET: "max_tokens"}


def take_thinking(values: dict[str, Any]) -> dict[str, Any]:
    """Take out of a row's own values what concerns its thoughts: fields of `request.Thinking`."""
    return {field: values.pop(name) for name, field in _FIELDS.items() if name in values}


class ThinkingSpec(Section):
    """How a reasoning model marks its thoughts; they go into the column `reasoning`, the rest into `response`."""

    start: str | None = Field(
        None,
        min_length=1,
        description="Text that begins the thoughts (the prompt may already have it). Default: <think>; of gpt-oss "
        "<|channel|>analysis<|message|>; of a known format of tool calls, what its models write.",
    )
    end: str | None = Field(
        None,
        min_length=1,
        description="Text that ends them. Default: </think>; of gpt-oss the beginning of its channel final.",
    )
    max_tokens: int | None = Field(
        None,
        **STRUCTURE_BOUNDS["thinking"]["max_tokens"].limits,
        description="Maximum number of thinking tokens; then the end marker is inserted and the model answers. 0: as "
        "soon as thoughts begin. Default: as many as the output.",
    )

    def to_param(self) -> Thinking:
        """With the markers that most models have, where none are named. White space around a marker tells nothing."""
        start, end = self.start or "<think>", self.end or "</think>"
        return Thinking(start.strip() or start, end.strip() or end, self.max_tokens)
