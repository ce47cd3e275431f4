"""The values of sampling parameters that are more than a number or a text: forms, thoughts, calls, circles.

Standard library only. Everybody imports these from `bulkrun.request`, the contract they are part of.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class StructuredOutput(NamedTuple):
    """What an output must look like. `value`: JSON schema text, a regex, a grammar (Lark or GBNF), or a JSON list of
    choices.

    Of calls that have to be made it is JSON: {format, functions: [{name, parameters}], one: whether it is one call}.
    """

    kind: Literal["json", "regex", "choice", "grammar", "tool_calls"]
    value: str


Begun = Literal["thoughts", "answer"]


class Thinking(NamedTuple):
    """How a reasoning model marks its thoughts, and how many tokens they may have (None: as many as the output).

    `begun`: what an output goes on with whose prompt has begun the message (None: the prompt's end tells).
    """

    start: str
    end: str
    max_tokens: int | None = None
    begun: Begun | None = None

    def begun_by(self, prompt_end: str) -> Begun | None:
        """What the prompt, which ends so, has begun. None: the output begins its thoughts itself, or is the answer."""
        ends = [marker for marker in (self.start, self.end) if prompt_end.rstrip().endswith(marker)]
        if self.begun is not None or not ends:
            return self.begun
        return "thoughts" if max(ends, key=len) == self.start else "answer"


ToolFormat = Literal[
    "hermes", "llama3_json", "mistral", "granite", "nemotron_json", "lfm2", "qwen3_coder", "glm45",
    "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "kimi_k2", "minimax_m2", "cohere", "hunyuan_a13b",
    "gemma4", "functiongemma", "harmony",
]  # fmt: skip


class ToolCalls(NamedTuple):
    """That tool calls are looked for in the answer, in which format, and whether more than the first one count.

    `texts` is for the formats that write texts without quotes: JSON of the parameters that may be texts, by function,
    each with the kinds of JSON values that it may be as well.
    """

    format: ToolFormat
    parallel: bool = True
    texts: str = ""


class RepetitionStop(NamedTuple):
    """When an output runs in circles: its tail is one pattern of at most `max_pattern` tokens, `repeats` times over,
    and at least `min_tokens` tokens long."""

    max_pattern: int
    repeats: int
    min_tokens: int
