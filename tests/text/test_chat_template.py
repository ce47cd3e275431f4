"""The oracle is transformers' own rendering."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from bulkrun.errors import ModelError
from bulkrun.sandbox import TemplateFailed
from bulkrun.text.chat_template import ChatTemplate

CHATML = """{% for message in messages %}
    {% if loop.first and message.role != 'system' %}
{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA = """{{- bos_token }}{%- if not date_string is defined %}{%- if strftime_now is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}{%- endif %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}{%- set system_message = messages[0]['content']|trim %}
{%- set messages = messages[1:] %}{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n"}}{{- "Today: " + date_string + "\\n\\n" + system_message }}
{{- "<|eot_id|>" }}
{%- if tools is not none %}{% for t in tools %}{{ t | tojson(indent=4) }}{% endfor %}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}{%- for message in loop_messages %}
{%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
{{- raise_exception("roles must alternate user and assistant") }}{%- endif %}{%- set ns.index = ns.index + 1 %}
{%- if message["role"] == "user" %}{%- if loop.last and system is defined %}
{{- "[INST] " + system + "\\n\\n" + message["content"] + "[/INST]" }}{%- else %}
{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}{%- else %}
{% generation %}{{- " " + message["content"] | trim + eos_token }}{% endgeneration %}{%- endif %}{%- endfor %}"""
QWEN = """{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if message.role == "user" %}{%- set ns.last = index %}{%- break %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
{%- if message.role == "assistant" %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
HELPERS = """{% macro show(x) %}{{ x|tojson }}{% endmacro %}{% set d = dict(a=1) %}{{ show({'k': '<é>&', 'n': None}) }}
{{ messages|map(attribute='role')|join(', ') }} {{ d.items()|list }} {{ unknown }}|{{ pad_token is defined }}
{% for m in messages if m.role != 'system' %}{% if loop.index>2 %}{% continue %}{% endif %}{{loop.index}}{% endfor %}
{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ "%s=%d"|format("x", 3) }} {{ [1, 2] + [3] }}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "helpers": HELPERS}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <there> & “you”\n"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "日本語 🎉"}],
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
        {"role": "user", "content": "{{ 7 * 7 }}"},
    ],
    [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so", "reasoning": "because"}],
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("chat", range(len(CHATS)))
@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_what_transformers_renders(name: str, chat: int, add_generation_prompt: bool) -> None:
    for options in ({}, {"enable_thinking": False}, {"date_string": "1 Jan"}):
        theirs, _ = render_jinja_template(
            [CHATS[chat]],
            chat_template=TEMPLATES[name],
            add_generation_prompt=add_generation_prompt,
            **SPECIAL,
            **options,
        )
        ours = ChatTemplate(TEMPLATES[name], SPECIAL)
        assert ours.render(CHATS[chat], add_generation_prompt=add_generation_prompt, **options) == theirs[0]


IN_PARTS = """{% for message in messages %}[{{ message.role }}]{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endfor %}"""
IN_BOTH = """{% for message in messages %}{% if message.content is string %}text: {{ message.content }}
{%- else %}{{ message.content[0].text }}{% endif %}{% endfor %}"""


def test_a_text_is_not_lost_in_a_template_that_looks_for_parts() -> None:
    chat = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": " Is this safe? "}]
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in chat]
    theirs, _ = render_jinja_template([parts], chat_template=IN_PARTS)
    assert ChatTemplate(IN_PARTS, {}).render(chat) == theirs[0] == "[system]Be kind.[user]Is this safe?"


def test_a_template_that_takes_text_is_given_text() -> None:
    assert ChatTemplate(IN_BOTH, {}).render([{"role": "user", "content": "Hi"}]) == "text: Hi"
    assert ChatTemplate("always the same", {}).render([{"role": "user", "content": "Hi"}]) == "always the same"


def test_options_may_have_any_name_and_never_replace_the_messages() -> None:
    template = ChatTemplate("{{ messages[0].content }} {{ cls }}", {})
    said = {"role": "user", "content": "Hi"}
    assert template.render([said], **{"self": 1, "messages": [], "cls": 2}) == "Hi 2"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_come_by_the_names_that_templates_read(name: str) -> None:
    template = ChatTemplate("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}", {})
    assert template.render([{"role": "assistant", "content": "So.", name: "Hm."}]) == "Hm. Hm."


def test_tools_and_documents_are_none_unless_they_are_given() -> None:
    template = ChatTemplate("{{ tools }} {{ documents }}", {})
    said = [{"role": "user", "content": "Hi"}]
    assert template.render(said) == "None None"
    assert template.render(said, tools=[1], documents=[2]) == "[1] [2]"


def test_the_date_is_the_given_clocks() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}, now=lambda: datetime(2031, 2, 3))
    assert template.render(CHATS[0]) == "2031-02-03"


def test_the_templates_own_complaint_is_the_message() -> None:
    with pytest.raises(TemplateFailed, match="roles must alternate"):
        ChatTemplate(MISTRAL, SPECIAL).render([CHATS[0][0], CHATS[0][0]])


def test_a_template_that_is_not_jinja_is_a_model_error_with_its_name_and_line() -> None:
    with pytest.raises(ModelError, match=r"mine\.jinja, line 2"):
        ChatTemplate("a\n{% for %}", {}, name="mine.jinja")


def test_rendering_changes_no_message() -> None:
    message = {"role": "user", "content": "x", "reasoning": "y"}
    ChatTemplate(QWEN, SPECIAL).render([message])
    assert message == {"role": "user", "content": "x", "reasoning": "y"}
