"""`sampling.tool_calls`: how the model writes tool calls, and what has to be called. Knows no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from bulkrun.job.jobfile.section import Section
from bulkrun.request import StructuredOutput, ToolCalls, ToolFormat


class ToolCallsSpec(Section):
    """How the model writes tool calls; they go into the column `tool_calls`, the rest into `response`."""

    format: Literal["auto", "none", ToolFormat] = Field(
        "auto",
        description="hermes: <tool_call>{name, arguments}</tool_call> (Hermes, Qwen2.5, Qwen3). llama3_json: {name, "
        "parameters} (Llama 3.1 to 3.3, 4), or [name(key=value)], as the small ones write it at times. mistral: behind "
        "[TOOL_CALLS]. granite: a list behind <|tool_call|> (Granite 3, Phi-4-mini). nemotron_json: a list between "
        "<TOOLCALL> and </TOOLCALL> (Nemotron Nano v2, Llama Nemotron). cohere: a list between <|START_ACTION|> and "
        "<|END_ACTION|> (Command R7B, Command A). hunyuan_a13b: a list between <tool_calls> and </tool_calls> (Hunyuan "
        "A13B, Jamba). lfm2: <|tool_call_start|>[name(key=value)], as in Python (LFM2, LFM2.5). qwen3_coder: "
        "<tool_call><function=name><parameter=key>value (Qwen3-Coder, Qwen3.5, Nemotron 3). glm45: "
        "<tool_call>name<arg_key>key</arg_key><arg_value>value (GLM 4.5 to 4.7). minimax_m2: "
        "<minimax:tool_call><invoke name=...><parameter name=...>value (MiniMax M2). gemma4: "
        "<|tool_call>call:name{key:value} (Gemma 4). functiongemma: <start_function_call>call:name{key:value} "
        "(FunctionGemma). deepseek_v3: a section of calls, with arguments between ```json and ``` (DeepSeek V3, R1). "
        "deepseek_v31: without those (DeepSeek V3.1). deepseek_v32: between <｜DSML｜function_calls>, each argument "
        "between tags (DeepSeek V3.2). deepseek_v4: the same between <｜DSML｜tool_calls>. kimi_k2: a section of calls "
        "of functions.name:0 (Kimi K2, Kimi Linear). harmony: a message to=functions.name, which ends the answer "
        "(gpt-oss). auto: told from the chat template. none: calls stay in the response, for other models.",
    )
    parallel: bool = Field(
        True, description="Whether an answer may have several calls; false: what follows the first one is left out."
    )

    @property
    def are_read(self) -> bool:
        """Whether calls are found in answers, and may be asked for."""
        return self.format != "none"

    @property
    def needs_texts(self) -> bool:
        """Whether only the tools tell which arguments are texts."""
        return needs_texts(self.format)

    def to_params(self, of_row: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's parameters for a row that says `of_row` (`tools.Offer`).

        A format that is `auto` must have been told before (by `prepare`).
        """
        if self.format == "none":
            return {}
        assert self.format != "auto", "the format is told when the job is prepared"
        texts = json.dumps(of_row["texts"]) if "texts" in of_row else ""
        calls = ToolCalls(self.format, of_row.get("parallel", self.parallel), texts)
        bound = {"structured_outputs": bound_calls(calls, of_row)} if "functions" in of_row else {}
        return {"tool_calls": calls, **bound}


def bound_calls(calls: ToolCalls, wanted: Mapping[str, Any]) -> StructuredOutput:
    """Calls that have to be made: `wanted` is {functions: [{name, parameters}], one: whether it is exactly one}."""
    one = wanted["one"] or not calls.parallel
    value = {"format": calls.format, "functions": wanted["functions"], "one": one}
    value |= {"texts": json.loads(calls.texts)} if calls.texts else {}
    return StructuredOutput("tool_calls", json.dumps(value))


def needs_texts(tool_format: str) -> bool:
    """Whether a format writes texts without quotes, so that who reads or asks for them is told by the tools."""
    return tool_format in ("qwen3_coder", "glm45", "minimax_m2", "deepseek_v32", "deepseek_v4")
