"""Between which models think, where it is not <think> and </think>. Imports nothing: also what reads runs asks it."""

from __future__ import annotations

from collections.abc import Mapping

# Between which gpt-oss thinks (OpenAI's harmony format) where a call may follow as well as the answer.
ANALYSIS = ("<|channel|>analysis<|message|>", "<|end|>")
# And where only the answer may: its prompts end with `<|end|><|start|>assistant`.
CHANNELS = (ANALYSIS[0], "<|end|><|start|>assistant<|channel|>final<|message|>")
# Between which models think that write calls in these formats, where it is not <think> and </think>.
THOUGHTS: Mapping[str, tuple[str, str]] = {
    "harmony": CHANNELS,
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "gemma4": ("<|channel>thought", "<channel|>"),
}
