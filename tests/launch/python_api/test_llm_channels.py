"""`LLM.chat` on a small gpt-oss whose markers are special tokens: thoughts, calls and answers come apart."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tokenizers

import bulkrun
from bulkrun.job.outputs.tool_calls import MARKERS
from bulkrun.request import Thinking
from tests.models.tiny_models import save_tiny_model
from tests.text.small_tokenizers import byte_level
from tests.text.tool_templates import HARMONY

UNIT = {"type": "object", "properties": {"unit": {"enum": ["C", "F"]}}, "required": ["unit"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": name, "parameters": UNIT}}
    for name in ("weather", "now")
]
SAID = [{"role": "user", "content": "Is it warm?"}]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> bulkrun.LLM:
    folder = save_tiny_model(tmp_path_factory.mktemp("oss"), "gpt_oss", vocab_size=320)
    file = byte_level(folder, {"chat_template": HARMONY}, vocab_size=300) / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_special_tokens(list(MARKERS["harmony"]))
    backend.save(str(file))
    return bulkrun.LLM(str(folder), dtype="float32")


@pytest.mark.parametrize("as_params", [False, True])
def test_a_call_has_to_be_made_with_or_without_thoughts(llm: bulkrun.LLM, as_params: bool) -> None:
    budget = Thinking("<|channel|>analysis<|message|>", "<|end|>", 8)
    sampling: Any = {"max_tokens": 200, "thinking": {"max_tokens": 8}}
    sampling = bulkrun.SamplingParams(max_tokens=200, thinking=budget) if as_params else sampling
    asked = [[{"role": "user", "content": f"Is it warm in {number}?"}] for number in range(128)]
    outputs = llm.chat(asked, sampling, tools=TOOLS, tool_choice="required")
    for output in outputs:
        assert (output.error, output.finish_reason) == (None, "tool_calls")
        [call] = output.tool_calls or []
        assert call["name"] in ("weather", "now") and json.loads(call["arguments"])["unit"] in ("C", "F")
    assert {output.reasoning is None for output in outputs} == {True, False}


def test_thoughts_are_found_without_tools_too(llm: bulkrun.LLM) -> None:
    regex = {"max_tokens": 40, "thinking": {"max_tokens": 6}, "structured_outputs": {"regex": "[ab]{3}"}}
    outputs = llm.chat([SAID] * 8, [regex] * 8)
    assert all(output.error is None and set(output.text or "-") <= set("ab") for output in outputs)
