"""Contents in the form that a template takes; the oracle is transformers, given that form by hand.

The templates are written after those of the models that name them: how each reads `content` is what counts here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from bulkrun.text.chat_template import ChatTemplate

Content = str | list[dict[str, str]]
GEMMA_3 = """{{ bos_token }}{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}{%- set first_user_prefix = messages[0]['content'] + '\\n\\n' -%}
    {%- else -%}{%- set first_user_prefix = messages[0]['content'][0]['text'] + '\\n\\n' -%}{%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}{%- set first_user_prefix = "" -%}{%- set loop_messages = messages -%}{%- endif -%}
{%- for message in loop_messages -%}
    {{ '<start_of_turn>' + message['role'] + '\\n' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}{{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}<image>{%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""
MISTRAL_SMALL = """{{- bos_token }}{%- if messages[0]["role"] == "system" %}
    {%- if messages[0]["content"] is string %}{%- set system_message = messages[0]["content"] %}
    {%- else %}{%- set system_message = messages[0]["content"][0]["text"] %}{%- endif %}
    {%- set loop_messages = messages[1:] %}
{%- else %}{%- set system_message = "Be kind." %}{%- set loop_messages = messages %}{%- endif %}
{{- "[SYSTEM_PROMPT]" + system_message + "[/SYSTEM_PROMPT]" }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if message["content"] is string %}{{- "[INST]" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST]" }}
            {%- for block in message["content"] %}
                {%- if block["type"] == "text" %}{{- block["text"] }}
                {%- elif block["type"] in ["image", "image_url"] %}{{- "[IMG]" }}
                {%- else %}{{- raise_exception("Only text and image blocks are supported!") }}{%- endif %}
            {%- endfor %}{{- "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}{{- message["content"] + eos_token }}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported!") }}{%- endif %}
{%- endfor %}"""
QWEN_VL = """{% set image_count = namespace(value=0) %}{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}
{% if content['type'] == 'image' or 'image' in content or 'image_url' in content %}
{% set image_count.value = image_count.value + 1 %}<|image_pad|>{% elif 'text' in content %}{{ content['text'] }}
{% endif %}{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
QWEN_MACRO = """{%- macro render_content(said, counted=true) -%}
    {%- if said is string %}{{- said }}{%- elif said is iterable and said is not mapping %}
        {%- for item in said %}{%- if 'text' in item %}{{- item.text }}
        {%- else %}{{- raise_exception('Unexpected item') }}{%- endif %}{%- endfor %}
    {%- elif said is none or said is undefined %}{{- '' }}{%- endif %}
{%- endmacro -%}
{%- for message in messages %}{%- set content = render_content(said=message.content)|trim %}
    {%- if message.role == "system" and not loop.first %}{{- raise_exception('System comes first.') }}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
GLM = """[gMASK]<sop>{%- macro visible_text(content) -%}
    {%- if content is string -%}{{- content }}
    {%- elif content is iterable and content is not mapping -%}
        {%- for item in content -%}
            {%- if item is mapping and item.type == 'text' -%}{{- item.text }}
            {%- elif item is string -%}{{- item }}{%- endif -%}
        {%- endfor -%}
    {%- else -%}{{- content }}{%- endif -%}
{%- endmacro -%}
{%- for m in messages %}<|{{ m.role }}|>{{ '\\n' + visible_text(m.content) }}{%- endfor -%}"""
JOINED = """{% for message in messages %}{% set said = message.content %}[{{ message.role }}]
{%- if said is not string %}{% set said = said | selectattr('type', 'equalto', 'text') | map(attribute='text')
 | join(' ') %}{% endif %}{{ said }}{% endfor %}"""
ONLY_PARTS = """{% for message in messages %}<{{ message.role }}>{% for part in message.content %}
{%- if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endfor %}"""
CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}
{{- '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
LLAMA_3 = """{% for message in messages %}<|{{ message.role }}|>{{ message['content'] | trim }}<|eot_id|>{% endfor %}"""
SMOL = """{%- for message in messages %}{%- set content = message.content if message.content is string else "" -%}
{{ '<' + message.role + '>' + content }}{%- endfor %}"""
AS_JSON = "{% for message in messages %}{{ message.role }}: {{ message.content | tojson }}\n{% endfor %}"
DEEPSEEK = """{{ bos_token }}{% set ns = namespace(system='') %}{%- for message in messages %}
{%- if message['role'] == 'system' %}{% set ns.system = ns.system + message['content'] %}{%- endif %}{%- endfor %}
{{- ns.system }}{%- for message in messages %}{%- if message['role'] == 'user' %}
{{- '<User>' + message['content'] }}{%- endif %}{%- if message['role'] == 'assistant' %}
{{- '<Assistant>' + message['content'].split('</think>')[-1] + eos_token }}{%- endif %}{%- endfor %}"""

EITHER = {"qwen-vl": QWEN_VL, "qwen-macro": QWEN_MACRO, "glm": GLM, "joined": JOINED}
TEXTS = {
    "chatml": CHATML,
    "llama-3": LLAMA_3,
    "smol": SMOL,
    "json": AS_JSON,
    "deepseek": DEEPSEEK,
    "no content": "always the same",
    "refuses": "{{ raise_exception('no') if messages | length < 9 }}{{ messages[0].content }}",
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
WORDS = st.text(st.sampled_from("ab .\n'\"{}<é"), max_size=6)
PARTS = st.lists(st.builds(lambda text: {"type": "text", "text": text}, WORDS), min_size=1, max_size=3)
CONTENTS = st.one_of(WORDS, PARTS)
CHATS = st.tuples(CONTENTS, CONTENTS, CONTENTS, CONTENTS).map(
    lambda said: [
        {"role": role, "content": content}
        for role, content in zip(("system", "user", "assistant", "user"), said, strict=True)
    ]
)
checked = settings(max_examples=25)


def theirs(source: str, chat: list[dict[str, Any]]) -> str:
    [text], _ = render_jinja_template([chat], chat_template=source, add_generation_prompt=True, **SPECIAL)
    return str(text)


def as_text(content: Content) -> Content:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def as_parts(content: Content) -> Content:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def changed(chat: list[dict[str, Any]], form: Any, roles: tuple[str, ...]) -> list[dict[str, Any]]:
    return [
        {**message, "content": form(message["content"])} if message["role"] in roles else message for message in chat
    ]


ROLES = ("system", "user", "assistant")


@pytest.mark.parametrize("name", EITHER)
def test_a_template_that_takes_either_is_given_what_came(name: str) -> None:
    ours = ChatTemplate(EITHER[name], SPECIAL)

    @given(CHATS)
    @checked
    def same(chat: list[dict[str, Any]]) -> None:
        assert ours.render(chat) == theirs(EITHER[name], chat)

    same()


@pytest.mark.parametrize("name", TEXTS)
def test_a_template_of_texts_is_given_parts_joined_by_newlines(name: str) -> None:
    ours = ChatTemplate(TEXTS[name], SPECIAL)

    @given(CHATS.map(lambda chat: chat * 3))
    @checked
    def same(chat: list[dict[str, Any]]) -> None:
        assert ours.render(chat) == theirs(TEXTS[name], changed(chat, as_text, ROLES))

    same()


@given(CHATS)
@checked
def test_a_template_of_parts_is_given_a_text_as_a_part(chat: list[dict[str, Any]]) -> None:
    assert ChatTemplate(ONLY_PARTS, {}).render(chat) == theirs(ONLY_PARTS, changed(chat, as_parts, ROLES))


@given(CHATS)
@checked
def test_each_role_has_its_own_form(chat: list[dict[str, Any]]) -> None:
    """Gemma's takes the first part of a system message alone, so does Mistral's, whose assistant says texts."""
    assert ChatTemplate(GEMMA_3, SPECIAL).render(chat) == theirs(GEMMA_3, changed(chat, as_text, ("system",)))
    given_texts = changed(chat, as_text, ("system", "assistant"))
    assert ChatTemplate(MISTRAL_SMALL, SPECIAL).render(chat) == theirs(MISTRAL_SMALL, given_texts)


def test_parts_are_not_joined_where_the_template_joins_them() -> None:
    parts = [{"type": "text", "text": "Is this"}, {"type": "text", "text": " safe?"}]
    text = ChatTemplate(MISTRAL_SMALL, SPECIAL).render([{"role": "user", "content": parts}])
    assert text.endswith("[INST]Is this safe?[/INST]")


def test_other_roles_get_the_text_that_every_template_knows() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    chat = [{"role": "user", "content": "6*7"}, {"role": "tool", "content": parts}]
    assert ChatTemplate(QWEN_VL, {}).render(chat) == theirs(QWEN_VL, changed(chat, as_text, ("tool",)))
    assert ChatTemplate(ONLY_PARTS, {}).render(chat) == "<user>6*7<tool>42"


LFM = """{%- for message in messages %}{{ message.role + ': ' }}
{%- set content = message['content'] %}
{%- if content is not string %}{% set content = content | tojson %}{% endif %}{{ content + '\\n' }}
{%- endfor %}"""  # of 2.0, which shows no calls either
LFM_2_5 = """{%- for message in messages %}{{ message.role + ': ' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for item in message.content %}{{ item.text }}{% endfor %}{% endif %}
{%- for call in message.tool_calls or [] %}{{ call.function.name + '()' }}{% endfor %}{{ '\\n' }}
{%- endfor %}"""
TOLD = """{%- for message in messages %}{{ message.role + ': ' }}
{%- for call in message.tool_calls or [] %}{{ call.function.name + '()' }}{% endfor %}
{%- if message.content is not none %}{{ message.content + '.' }}{% endif %}{{ '\\n' }}
{%- endfor %}"""


@pytest.mark.parametrize(
    ("template", "shown"),
    [(LFM, ""), (LFM_2_5, "now()"), (TOLD, "now()")],
    ids=["prints it", "fails on it", "knows it"],
)
def test_a_message_that_only_calls_says_nothing(template: str, shown: str) -> None:
    """OpenAI has no content in it: that is an empty text to templates that do not know it."""
    call = {"id": "abcdef012", "type": "function", "function": {"name": "now", "arguments": {}}}
    chat = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert f"assistant: {shown}\n" in ChatTemplate(template, {}).render(chat) + "\n"


JSON_TEXTS = """{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<User>' + message['content'] }}{% endif %}
{%- if message['role'] == 'assistant' and message['tool_calls'] is defined and message['tool_calls'] is not none %}
{%- for tool in message['tool_calls'] %}
{{- '<call>' + tool['function']['name'] + '<sep>' + tool['function']['arguments'] }}
{%- endfor %}{{ eos_token }}{%- endif %}{%- endfor %}"""  # DeepSeek V3, R1 and V3.1
PRINTED = JSON_TEXTS.replace("'<sep>' + tool['function']['arguments']", "'<sep>' ~ tool['function']['arguments']")
AS_COMES = JSON_TEXTS.replace("+ tool['function']['arguments']", "+ (tool['function']['arguments'] | tojson)")


@pytest.mark.parametrize("template", [JSON_TEXTS, PRINTED, AS_COMES], ids=["fails", "prints Python", "makes JSON"])
def test_arguments_are_json_to_templates_of_texts(template: str) -> None:
    call = {"id": "abcdef012", "type": "function", "function": {"name": "now", "arguments": {"city": 'Zü"rich'}}}
    chat = [{"role": "user", "content": "So?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ChatTemplate(template, SPECIAL).render(chat) == '<User>So?<call>now<sep>{"city": "Zü\\"rich"}</s>'


QWEN_3 = """{%- if messages[0].role == 'system' %}{{ '<system>' + messages[0].content }}{% endif %}
{%- for message in messages %}{% if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<' + message.role + '>' + message.content }}{% endif %}{% endfor %}"""
ANY_ROLE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "role"),
    [(QWEN_3, "system"), (GEMMA_3, None), (ANY_ROLE, "developer"), (MISTRAL_SMALL, None), (DEEPSEEK, None)],
    ids=["leaves it out", "has no name for it", "knows it", "refuses it", "has no names"],
)
@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
def test_what_a_developer_says_is_not_lost(template: str, role: str | None, content: Content) -> None:
    chat = [{"role": "developer", "content": content}, {"role": "user", "content": "So?"}]
    text = ChatTemplate(template, SPECIAL).render(chat)
    assert "Be brief." in text and (role is None or f"<{role}>Be brief." in text)


def test_a_role_of_which_a_first_message_tells_nothing_keeps_its_name() -> None:
    """Neither a system message nor a developer's is taken there, which says nothing of a later one."""
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}" + ANY_ROLE
    chat = [{"role": "user", "content": "So?"}, {"role": "developer", "content": "Be brief."}]
    assert ChatTemplate(template, SPECIAL).render(chat) == "<user>So?<developer>Be brief."
