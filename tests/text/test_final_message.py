"""Prompts that end with the last message's text. The oracle is transformers: the same text, the same token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from bulkrun.sandbox import TemplateFailed
from bulkrun.text.chat_template import ChatTemplate
from bulkrun.text.tokenizer import Tokenizer
from tests.text import later_tool_templates, test_chat_template, test_content_form, tool_templates
from tests.text.small_tokenizers import byte_level

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# As Qwen3's: the last answer always has thoughts, if only empty ones; of older ones they are left out.
QWEN_3 = """{%- set ns = namespace(last=-1) %}{%- for message in messages %}{%- if message.role == 'user' %}
{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
{%- if message.role == 'assistant' %}{%- set reasoning = '' %}
{%- if message.reasoning_content is string %}{%- set reasoning = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or reasoning) %}
{{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + content }}{%- endif %}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + content }}{%- endif %}
{{- '<|im_end|>\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TEMPLATES = {
    "chatml": test_chat_template.CHATML,
    "llama": test_chat_template.LLAMA,
    "mistral": test_chat_template.MISTRAL,
    "qwen-3": QWEN_3,
    "gemma-3": test_content_form.GEMMA_3,
    "mistral-small": test_content_form.MISTRAL_SMALL,
    "qwen-vl": test_content_form.QWEN_VL,
    "glm": test_content_form.GLM,
    "deepseek-r1": test_content_form.DEEPSEEK,
    "hermes": tool_templates.HERMES,
    "deepseek-v3.1": tool_templates.DEEPSEEK_31,
    "kimi": tool_templates.KIMI,
    "gpt-oss": tool_templates.HARMONY,
    "cohere": later_tool_templates.COHERE,
    "gemma-4": later_tool_templates.GEMMA4,
}
ASKED = {"role": "user", "content": "Why is it so?"}
WORDS = st.lists(
    st.sampled_from(["It", " is", "<think>\n", "\n</think>\n\n", " ", "\n", "日本", '"{{ 1 }}"', "</s>"]), max_size=6
)
TEXTS = WORDS.map("".join).filter(str.strip)


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def theirs(source: str, chat: list[dict[str, Any]], **options: Any) -> str | None:
    """Their prompt; None where they refuse it."""
    asked: dict[str, Any] = {"chat_template": source, "continue_final_message": True, **SPECIAL, **options}
    try:
        [text], _ = render_jinja_template([chat], **asked)
    except ValueError:
        return None
    return str(text)


def ours(template: ChatTemplate, chat: list[dict[str, Any]], **options: Any) -> str | None:
    try:
        return template.render(chat, continue_final_message=True, **options)
    except TemplateFailed as problem:
        assert "cannot be continued" in str(problem)
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_prompt_is_theirs_whatever_the_message_says(name: str) -> None:
    template = ChatTemplate(TEMPLATES[name], SPECIAL)

    @given(TEXTS, st.sampled_from([[ASKED], [{"role": "system", "content": "Be brief."}, ASKED]]))
    @settings(max_examples=20)
    def same(text: str, before: list[dict[str, Any]]) -> None:
        for options in ({}, {"enable_thinking": False}):
            prompt = ours(template, [*before, said(text)], **options)
            assert prompt == theirs(TEMPLATES[name], [*before, said(text)], **options)
            assert prompt is None or prompt.rstrip().endswith(text.strip())

    same()


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_token_ids_are_theirs(name: str, tmp_path: Path) -> None:
    byte_level(tmp_path, {"chat_template": TEMPLATES[name]})
    tokenizer, oracle = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("It is", "It is because of the \n", " a"):
        chat = [ASKED, said("So."), ASKED, said(text)]
        prompt = tokenizer.chat_renderer().render(chat, continue_final_message=True)
        want = oracle.apply_chat_template(chat, continue_final_message=True, return_dict=False)
        assert tokenizer.encode_batch([prompt], add_special_tokens=False) == [want]


def test_thoughts_beside_the_text_come_before_it() -> None:
    chat = [ASKED, said("It is", reasoning_content="Hm.")]
    assert ours(ChatTemplate(QWEN_3, SPECIAL), chat) == theirs(QWEN_3, chat)
    assert str(theirs(QWEN_3, chat)).endswith("assistant\n<think>\nHm.\n</think>\n\nIt is")


def test_a_template_is_asked_for_no_other_message() -> None:
    source = "{{ add_generation_prompt }}: {% for m in messages %}{{ m.content }} {% endfor %}"
    assert ours(ChatTemplate(source, {}), [ASKED, said("So")]) == theirs(source, [ASKED, said("So")]) is not None


def test_the_last_text_part_is_where_the_model_goes_on() -> None:
    chat = [ASKED, said([{"type": "text", "text": "One"}, {"type": "text", "text": " two "}])]
    for source in (test_content_form.QWEN_VL, test_content_form.JOINED, test_content_form.GLM):
        prompt = ours(ChatTemplate(source, SPECIAL), chat)
        assert prompt is not None and prompt == theirs(source, chat)
    assert ours(ChatTemplate(test_content_form.CHATML, SPECIAL), chat) == theirs(
        test_content_form.CHATML, [ASKED, said("One\n two ")]
    )
    one_part = [{**ASKED, "content": [{"type": "text", "text": "Why?"}]}, said([{"type": "text", "text": "It is"}])]
    in_parts = theirs(test_content_form.ONLY_PARTS, one_part)
    texts = [{**ASKED, "content": "Why?"}, said("It is")]
    assert in_parts is not None and ours(ChatTemplate(test_content_form.ONLY_PARTS, {}), texts) == in_parts


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}",
        "{% for m in messages[:1] %}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{{ m.content | replace('\\n', ' ') }}{% endfor %}",
    ],
)
def test_a_template_that_leaves_out_some_of_it_cannot_be_continued(source: str) -> None:
    """The user says the same, which is not where the model is."""
    text = "<think>\na</think>b"
    with pytest.raises(TemplateFailed, match=r"^continue_final_message: the template leaves out or changes"):
        ChatTemplate(source, {}).render([{**ASKED, "content": text}, said(text)], continue_final_message=True)


def test_continuing_changes_no_message() -> None:
    chat = [ASKED, said([{"type": "text", "text": "It is"}])]
    ChatTemplate(test_content_form.QWEN_VL, {}).render(chat, continue_final_message=True)
    assert chat == [ASKED, said([{"type": "text", "text": "It is"}])]
