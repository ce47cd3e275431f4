"""Tools and calls in chat templates: what is rendered is what transformers renders, and the template tells the form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bulkrun.job.outputs.call import Call
from bulkrun.job.outputs.tool_calls import split_calls
from bulkrun.job.prompts.conversations import read_messages
from bulkrun.request import ToolFormat
from bulkrun.sandbox import TemplateFailed
from bulkrun.text.chat_template import ChatTemplate
from bulkrun.text.tool_format import tool_format_of
from tests.text.later_tool_templates import COHERE, DSML, FUNCTIONGEMMA, GEMMA4, HUNYUAN, MINIMAX
from tests.text.tool_templates import (
    CALL,
    CODER,
    DEEPSEEK_3,
    DEEPSEEK_31,
    GLM,
    HARMONY,
    HERMES,
    HISTORY,
    KIMI,
    LFM,
    LLAMA,
    MISTRAL,
    NEMOTRON,
    NEMOTRON_3,
    TOOLS,
)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATES = {
    "hermes": HERMES, "llama3_json": LLAMA, "mistral": MISTRAL, "qwen3_coder": CODER, "glm45": GLM, "harmony": HARMONY,
    "nemotron_json": NEMOTRON, "lfm2": LFM, "deepseek_v3": DEEPSEEK_3, "deepseek_v31": DEEPSEEK_31, "kimi_k2": KIMI,
    "cohere": COHERE, "hunyuan_a13b": HUNYUAN, "gemma4": GEMMA4, "functiongemma": FUNCTIONGEMMA,
    "minimax_m2": MINIMAX,
    "deepseek_v32": DSML, "deepseek_v4": DSML.replace("function_calls>", "tool_calls>"),
}  # fmt: skip


def with_text(call: dict[str, Any]) -> dict[str, Any]:
    """A call as OpenAI writes it, its arguments as text."""
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"])}}


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1], None])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_and_earlier_calls_are_rendered_as_by_transformers(form: str, tools: Any, as_text: bool) -> None:
    [wanted], _ = render_jinja_template(
        conversations=[HISTORY], tools=tools, chat_template=TEMPLATES[form], add_generation_prompt=True, **TOKENS
    )
    given = [{**m, "tool_calls": [with_text(c) for c in m["tool_calls"]]} if "tool_calls" in m else m for m in HISTORY]
    messages = read_messages(given if as_text else HISTORY)
    assert ChatTemplate(TEMPLATES[form], TOKENS).render(messages, **({"tools": tools} if tools else {})) == wanted
    assert "Zürich" in wanted and ("à jour" in wanted) is (tools is not None)


@pytest.mark.parametrize("form", sorted(TEMPLATES.keys() - {"llama3_json", "harmony"}))
def test_what_a_template_writes_of_earlier_calls_is_read_as_calls(form: ToolFormat) -> None:
    """Those of Llama and gpt-oss are known by where they stand."""
    rendered = ChatTemplate(TEMPLATES[form], TOKENS).render(read_messages(HISTORY))
    assert split_calls(rendered, form).calls == [Call("weather", '{"city": "Zürich"}')]


@pytest.mark.parametrize(("form", "call"), [("llama3_json", [CALL, CALL]), ("mistral", [{**CALL, "id": "short"}])])
def test_what_a_template_cannot_render_is_its_own_complaint(form: str, call: list[Any]) -> None:
    messages = read_messages([HISTORY[0], {"role": "assistant", "tool_calls": call}])
    with pytest.raises(TemplateFailed, match=r"single tool-calls|9 characters"):
        ChatTemplate(TEMPLATES[form], TOKENS).render(messages)


@pytest.mark.parametrize("form", TEMPLATES)
def test_the_form_is_told_by_the_template(form: str) -> None:
    assert tool_format_of(TEMPLATES[form]) == form


def test_llama_4_writes_calls_as_llama_3_does() -> None:
    renamed = {"start_header_id": "header_start", "end_header_id": "header_end", "eot_id": "eot"}
    source = LLAMA
    for old, new in renamed.items():
        source = source.replace(f"<|{old}|>", f"<|{new}|>")
    assert tool_format_of(source) == "llama3_json"
    for answer in ('{"name": "weather", "parameters": {"city": "Zürich"}}', "[weather(city='Zürich')]"):
        assert split_calls(answer, "llama3_json").calls == [Call("weather", '{"city": "Zürich"}')]


def test_the_form_of_granite_is_told_by_its_words() -> None:
    source = "respond with <|tool_call|> followed by a JSON list of tools used"  # in the templates of 3.1 to 3.3
    assert tool_format_of(source) == "granite"


LFM_OTHERS = [
    "{%- set ns.system_prompt = 'List of tools: <|tool_list_start|>[' -%}",  # LFM2
    "{%- set keep_past_thinking = keep_past_thinking | default(false) -%}{{ 'List of tools: [' }}",  # early ones of 2.5
]


@pytest.mark.parametrize("source", LFM_OTHERS)
def test_the_form_of_lfm2_is_told_by_how_tools_are_listed(source: str) -> None:
    assert tool_format_of(source) == "lfm2"


def test_the_form_of_the_first_kimi_k2_is_told_by_how_tools_are_listed() -> None:
    source = "{{ '<|im_system|>tool_declare<|im_middle|>' -}}{{- tools | tojson -}}"  # it writes no earlier calls
    assert tool_format_of(source) == "kimi_k2"


def test_nemotron_3_writes_calls_as_qwen3_coder_does() -> None:
    assert NEMOTRON_3 != CODER and tool_format_of(NEMOTRON_3) == "qwen3_coder"


OTHERS = [
    "{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}",
    "{% for c in m.tool_calls %}<tool_call>\n<invoke name={{ c.name }}>\n{% endfor %}",  # as MiniMax M3
    "<tool_call>{{ c.name }}<tool_sep><arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>",  # as Hunyuan
    "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}{% endfor %}",  # no tools
    "<|start_header_id|>{{ message.role }}<|end_header_id|>",  # Llama 3.0
    """<|start_header_id|>{% for c in m.tool_calls %}{'function': '{{ c.name }}', 'args': {{ c.arguments }}}""",
]


@pytest.mark.parametrize("source", OTHERS)
def test_other_templates_do_not_tell(source: str) -> None:
    assert tool_format_of(source) is None
