"""The format in which a model writes tool calls, told from the source of its chat template. Reads no calls.

A template writes the calls of earlier messages as the model was trained to write them. Only formats that can be told
for sure are: several models have `<tool_call>`, and not all of them JSON in it.
"""

from __future__ import annotations

import re

from bulkrun.request import ToolFormat

# What tells a format, in this order: each of the words stands in the template.
_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    ("mistral", ("[TOOL_CALLS]",)),
    ("granite", ("<|tool_call|>",)),
    ("nemotron_json", ("<TOOLCALL>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("lfm2", ("<|tool_list_start|>",)),  # LFM2's own templates write no earlier calls
    ("lfm2", ("List of tools: ", "keep_past_thinking")),  # nor do the first ones of 2.5, which list tools without it
    ("deepseek_v3", ("<｜tool▁calls▁begin｜>", "```json")),  # R1 and its distillations too
    ("deepseek_v31", ("<｜tool▁calls▁begin｜>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls>")),
    ("deepseek_v4", ("｜DSML｜", "tool_calls>")),
    ("minimax_m2", ("<minimax:tool_call>", "<invoke name=")),
    ("kimi_k2", ("<|tool_call_argument_begin|>",)),
    ("kimi_k2", ("<|im_middle|>", "tool_declare")),  # the first ones write no earlier calls
    ("cohere", ("<|START_ACTION|>",)),
    ("gemma4", ("<|tool_call>call:",)),
    ("functiongemma", ("<start_function_call>call:",)),
    ("hunyuan_a13b", ("<tool_calls>[",)),
    ("harmony", ("<|channel|>", "functions.")),
)
_OTHERS = ("<function", "<arg_", "<parameter", "<invoke")  # within <tool_call>
_OF_LLAMA = ("<|start_header_id|>", "<|header_start|>")  # 3.1 to 3.3, and 4
_AFTER_NAME = "<tool_sep>"  # of Hunyuan, whose calls are else as GLM's
_PARAMETERS = re.compile(r"""["']parameters\\?["']\s*:""")  # before the arguments, as Llama's templates have it


def tool_format_of(source: str) -> ToolFormat | None:
    """The format of its tool calls, or None where the template has none of those that can be read."""
    told = next((one for one, signs in _SIGNS if all(sign in source for sign in signs)), None)
    if told is not None:
        return told
    if "<tool_call>" in source:
        return _within_tool_call(source)
    if any(sign in source for sign in _OF_LLAMA) and "tool_calls" in source and _PARAMETERS.search(source):
        return "llama3_json"
    return None


def _within_tool_call(source: str) -> ToolFormat | None:
    if "<function=" in source and "<parameter=" in source:
        return "qwen3_coder"
    if "<arg_key>" in source and "<arg_value>" in source and _AFTER_NAME not in source:
        return "glm45"
    return None if any(other in source for other in _OTHERS) else "hermes"
