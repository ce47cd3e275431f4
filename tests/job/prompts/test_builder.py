from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.errors import JobFileError
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.encoder import Prompt, RenderedPrompt
from bulkrun.job.prompts.fit import PromptFitter, PromptFrame
from bulkrun.request import RowError
from bulkrun.text.tokenizer import Tokenizer
from tests.job.plan.planning import BOS, CharacterCodec, job
from tests.text.small_tokenizers import byte_level

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be 2"}
TURNS = [USER, {"role": "assistant", "content": "Yo"}, USER]
LINE = {"custom_id": "1", "url": "/v1/chat/completions"}


def batch_of(rows: Sequence[dict[str, Any]], first: int = 0, errors: dict[int, RowError] | None = None) -> InputBatch:
    return InputBatch(Position(0, first), pa.RecordBatch.from_pylist(list(rows)), errors or {})


def build(
    prompt: dict[str, Any], rows: Sequence[dict[str, Any]], *, chat: bool = True, **sections: Any
) -> list[Prompt | RowError]:
    batch = batch_of(rows)
    spec = job("unused.jsonl", prompt=prompt, **sections)
    return PromptBuilder(spec, batch.rows.schema.names, CharacterCodec(chat=chat)).build(batch)


def text(prompt: Prompt | RowError) -> str:
    assert isinstance(prompt, Prompt), prompt
    return "".join(chr(token) for token in prompt.token_ids if token != BOS)


def code(prompt: Prompt | RowError) -> str:
    assert isinstance(prompt, RowError), prompt
    return prompt.code


@pytest.mark.parametrize("prompt", [{"column": "a"}, {"template": "{{ a }}"}])
def test_bytes_are_their_text_or_an_error_that_names_the_column(prompt: dict[str, Any]) -> None:
    good, bad = build({**prompt, "chat_template": "none"}, [{"a": "é".encode()}, {"a": b"\xff"}])
    assert text(good) == "é"
    assert code(bad) == "bad_input" and isinstance(bad, RowError) and "column 'a': bytes that are not" in bad.message


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ({"template": "Say {{ a }}"}, "[user]Say x\n[assistant]"),
        ({"column": "a"}, "[user]x\n[assistant]"),
        ({"column": "a", "system": "Be {{ b }}"}, "[system]Be 2\n[user]x\n[assistant]"),
        (
            {"messages": [{"role": "user", "content": "{{ b }}"}, {"role": "assistant", "content": "{{ a }}"}]},
            "[user]2\n[assistant]x\n[assistant]",
        ),
        ({"template": "{{ a }}", "chat_template": "none"}, "x"),
        ({"column": "a", "chat_template_kwargs": {"think": False}}, "[user]x\n[think=False][assistant]"),
    ],
)
def test_every_form_of_prompt_section(prompt: dict[str, Any], expected: str) -> None:
    assert text(build(prompt, [{"a": "x", "b": 2}])[0]) == expected


def test_a_conversation_that_is_judged_asks_for_no_answer() -> None:
    spec = job("x", prompt={"messages": "m"}).model_copy(update={"task": "classify"})
    [judged] = PromptBuilder(spec, ["m"], CharacterCodec(chat=True)).build(batch_of([{"m": [USER]}]))
    assert text(judged) == "[user]Hi\n[add_generation_prompt=False][assistant]"


def test_without_a_chat_template_the_text_is_the_prompt_after_bos() -> None:
    plain, system = (build(p, [{"a": "x"}], chat=False)[0] for p in ({"column": "a"}, {"column": "a", "system": "s"}))
    assert isinstance(plain, Prompt) and plain.token_ids == [BOS, ord("x")]
    assert text(system) == "s\n\nx"


def test_messages_need_a_chat_template_and_that_is_said_before_the_run() -> None:
    with pytest.raises(JobFileError, match=r"prompt\.messages: the model 'none' has no chat template"):
        build({"messages": "m"}, [{"m": "[]"}], chat=False)


def test_values_for_a_chat_template_that_is_not_there_are_refused_before_the_run() -> None:
    with pytest.raises(JobFileError, match=r"prompt\.chat_template_kwargs: the model 'none' has no chat template"):
        build({"column": "a", "chat_template_kwargs": {"think": False}}, [{"a": "x"}], chat=False)


@pytest.mark.parametrize("none", ["", "[]", []])
def test_a_row_without_tools_in_its_column_is_offered_none(none: Any) -> None:
    prompt, calls = {"column": "a", "tools": "t"}, {"tool_calls": {"format": "hermes"}}
    for prompt_of_row in build(prompt, [{"a": "x", "t": none}, {"a": "x", "t": None}], sampling=calls):
        assert text(prompt_of_row) == "[user]x\n[assistant]"


@pytest.mark.parametrize("as_json", [False, True])
def test_a_messages_column_is_structs_or_json(as_json: bool) -> None:
    chats: list[Any] = [[USER], [{"role": "system", "content": "s"}, USER, {"role": "assistant", "content": "{{ 1 }}"}]]
    rows = [{"m": json.dumps(chat) if as_json else chat} for chat in chats]
    assert [text(prompt) for prompt in build({"messages": "m"}, rows)] == [
        "[user]Hi\n[assistant]",
        "[system]s\n[user]Hi\n[assistant]{{ 1 }}\n[assistant]",
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_sharegpts_messages_are_messages(as_json: bool) -> None:
    chat = [{"from": "system", "value": "s"}, {"from": "human", "value": "Hi"}, {"from": "GPT", "value": "Yes", "w": 1}]
    odd = [{"from": "function", "value": "x"}]
    good, bad = build({"messages": "m"}, [{"m": json.dumps(one) if as_json else one} for one in (chat, odd)])
    assert text(good) == "[system]s\n[user]Hi\n[assistant]Yes\n[assistant]"
    assert bad.code == "bad_input" and "from 'function', which is none of system, human, user, gpt" in bad.message


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "not json",
        "{}",
        '["x"]',
        '[{"role": "user"}]',
        '[{"role": 1, "content": "x"}]',
        "[" * 10**5,
        "1" * 10**4,
    ],
)
def test_a_bad_messages_value_is_bad_input_that_names_the_column_and_stays_short(value: str | None) -> None:
    error = build({"messages": "m"}, [{"m": value}, {"m": json.dumps([USER])}])[0]
    assert code(error) == "bad_input"
    assert isinstance(error, RowError) and "'m'" in error.message and len(error.message) < 200


@pytest.mark.parametrize(("value", "expected"), [(None, "bad_input"), ("", "empty_prompt"), (" \n", "empty_prompt")])
def test_a_null_prompt_is_bad_input_and_an_empty_one_is_empty(value: str | None, expected: str) -> None:
    rows = [{"a": value}, {"a": "fine"}]
    assert code(build({"column": "a"}, rows)[0]) == expected
    assert code(build({"column": "a", "system": "with a system prompt"}, rows)[0]) == expected
    assert code(build({"template": "{{ a }}"}, rows)[0]) == expected


def test_a_number_is_no_prompt_but_a_template_prints_it() -> None:
    assert code(build({"column": "a"}, [{"a": 7}])[0]) == "bad_input"
    assert text(build({"template": "{{ a }}"}, [{"a": 7}], chat=False)[0]) == "7"


def test_empty_conversations_are_empty_prompts_the_jobs_own_system_message_aside() -> None:
    rows = [
        {"m": "[]"},
        {"m": json.dumps([SYSTEM, {**USER, "content": " "}])},
        {"m": json.dumps([{**SYSTEM, "content": ""}])},
    ]
    for prompt in ({"messages": "m"}, {"messages": "m", "system": "s"}):
        assert [code(made) for made in build(prompt, rows)] == ["empty_prompt"] * 3


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_alone_is_a_conversation_where_the_row_brings_it(role: str) -> None:
    alone = json.dumps([{**SYSTEM, "role": role}])
    assert text(build({"messages": "m"}, [{"m": alone}])[0]) == f"[{role}]Be 2\n[assistant]"
    line = {**LINE, "body": f'{{"messages": {alone}}}'}
    made = build({}, [line])[0]
    assert text(made) == "[system]Be 2\n[assistant]"
    assert isinstance(made, Prompt) and "".join(map(chr, made.frame().head)) == "[system]"
    messages = [{"role": "system", "content": "{{ a }}"}]
    assert text(build({"messages": messages}, [{"a": "x"}])[0]) == "[system]x\n[assistant]"


def test_a_lone_surrogate_is_bad_input_not_a_crash_of_its_batch() -> None:
    bad, good = build({"template": "{% if a %}\ud83d{% else %}fine{% endif %}"}, [{"a": True}, {"a": False}])
    assert code(bad) == "bad_input" and "fine" in text(good)


def test_a_value_that_python_cannot_hold_is_bad_input_of_its_row_where_the_prompt_reads_it() -> None:
    days = pa.array([0, 10**8], pa.date32())
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pydict({"a": ["x", "y"], "day": days}))
    reads, ignores = (
        PromptBuilder(job("x", prompt={"template": template}), ["a", "day"], CharacterCodec()).build(batch)
        for template in ("{{ a }} {{ day }}", "{{ a }}")
    )
    assert text(reads[0]) == "x 1970-01-01" and code(reads[1]) == "bad_input"
    assert [text(prompt) for prompt in ignores] == ["x", "y"]


def test_rows_that_could_not_be_read_keep_their_own_error() -> None:
    error = RowError("bad_input", "in.jsonl:2: broken")
    batch = batch_of([{"a": "x"}, {"a": None}, {"a": "y"}], errors={1: error})
    prompts = PromptBuilder(job("x", prompt={"column": "a"}), ["a"], CharacterCodec()).build(batch)
    assert prompts[1] is error and [text(prompts[0]), text(prompts[2])] == ["x", "y"]


def test_only_the_columns_that_are_needed_are_converted() -> None:
    spec = job("x", prompt={"template": "{{ b }}"}, sampling={"per_row": {"top_p": "c"}})
    assert PromptBuilder(spec, ["a", "b", "c"], CharacterCodec()).reads == ["b", "c"]


@pytest.mark.parametrize("prompt", [{"column": "aa"}, {"messages": "aa"}, {"template": "{{ aa }}"}])
def test_an_unknown_column_is_found_before_the_run(prompt: dict[str, Any]) -> None:
    with pytest.raises(JobFileError, match="did you mean 'aaa'"):
        build(prompt, [{"aaa": "x"}])


def test_a_chat_template_file_is_used_and_a_missing_or_broken_one_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path / "model"))
    good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
    good.write_text("{{ bos_token }}{{ messages[0].content }}<|im_end|>")
    bad.write_text("{% if %}")

    def builder(path: Path) -> PromptBuilder:
        return PromptBuilder(job("x", prompt={"column": "a", "chat_template": str(path)}), ["a"], tokenizer)

    prompt = builder(good).build(batch_of([{"a": "fox"}]))[0]
    assert isinstance(prompt, Prompt)
    assert tokenizer.decode_batch([prompt.token_ids], skip_special_tokens=False) == ["<s>fox<|im_end|>"]
    with pytest.raises(JobFileError, match=r"prompt\.chat_template: .*bad\.jinja, line 1: "):
        builder(bad)
    with pytest.raises(JobFileError, match=r"prompt\.chat_template: cannot read '\\x00': embedded null byte"):
        PromptBuilder(job("x", prompt={"column": "a", "chat_template": "\0"}), ["a"], tokenizer)
    with pytest.raises(JobFileError, match=r"prompt\.chat_template: cannot read .*missing\.jinja.*: No such file"):
        builder(tmp_path / "missing.jinja")


def test_a_byte_order_mark_is_no_part_of_a_chat_template_file(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}", encoding="utf-8-sig")
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path / "model"))
    spec = job("x", prompt={"column": "a", "chat_template": str(tmp_path / "t.jinja")})
    rendered = PromptBuilder(spec, ["a"], tokenizer).render(batch_of([{"a": "fox"}]))[0]
    assert isinstance(rendered, RenderedPrompt) and rendered.text == "fox"


def test_a_chat_templates_complaint_is_the_rows_error(tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% if messages|length > 1 %}{{ raise_exception('one message only') }}{% endif %}ok")
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path / "model"))
    spec = job("x", prompt={"messages": "m", "chat_template": str(template)})
    rows = [{"m": json.dumps([USER])}, {"m": json.dumps([USER, USER])}]
    fine, error = PromptBuilder(spec, ["m"], tokenizer).build(batch_of(rows))
    assert isinstance(fine, Prompt)
    assert error == RowError("bad_template", "chat template: one message only")


@pytest.mark.parametrize(
    ("prompt", "row", "head"),
    [
        ({"column": "a"}, {"a": "x"}, "[user]"),
        ({"column": "a", "system": "Be {{ b }}"}, {"a": "x", "b": 2}, "[system]Be 2\n[user]"),
        ({"messages": "m"}, {"m": [SYSTEM, *TURNS]}, "[system]Be 2\n[user]"),
        ({"messages": "m"}, {"m": TURNS}, "[user]"),
        (
            {},
            {**LINE, "body": json.dumps({"messages": [{**SYSTEM, "role": "developer"}, USER]})},
            "[system]Be 2\n[user]",
        ),
    ],
)
def test_the_frame_is_what_surrounds_a_conversation_with_its_system_message(
    prompt: dict[str, Any], row: dict[str, Any], head: str
) -> None:
    made = build(prompt, [row])[0]
    assert isinstance(made, Prompt)
    frame = made.frame()
    assert ("".join(map(chr, frame.head)), "".join(map(chr, frame.tail))) == (head, "\n[assistant]")


def test_the_frame_of_a_plain_text_is_bos_and_the_system_text() -> None:
    plain, system = (build(p, [{"a": "x"}], chat=False)[0] for p in ({"column": "a"}, {"column": "a", "system": "s"}))
    assert isinstance(plain, Prompt) and isinstance(system, Prompt)
    assert plain.frame() == PromptFrame([BOS], []) and system.frame() == PromptFrame([BOS, *map(ord, "s\n\n")], [])


def test_a_prompt_that_is_cut_at_its_start_keeps_its_system_message() -> None:
    long = build({"column": "a", "system": "Judge."}, [{"a": "0123456789" * 9}])[0]
    cut = fit_prompt(PromptFitter(60, "truncate_left"), long)
    assert text(cut) == "[system]Judge.\n[user]1234567890123456789\n[assistant]"


def test_batches_are_tokenized_on_other_threads_and_come_back_in_order() -> None:
    threads: set[int] = set()

    class Watched(CharacterCodec):
        def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
            threads.add(threading.get_ident())
            return super().encode_batch(texts, add_special_tokens)

    builder = PromptBuilder(job("x", prompt={"column": "a"}), ["a"], Watched())
    batches = [batch_of([{"a": f"{start}-{row}"} for row in range(3)], start) for start in range(50)]
    result = list(builder.stream(batches))
    assert [text(prompt) for _, prompts in result for prompt in prompts] == [
        f"{start}-{row}" for start in range(50) for row in range(3)
    ]
    assert [batch for batch, _ in result] == batches
    assert threading.get_ident() not in threads


def test_the_stream_reads_only_a_few_batches_ahead_and_ends_with_its_reader() -> None:
    read = 0

    def endless() -> Any:
        nonlocal read
        while True:
            read += 1
            yield batch_of([{"a": "x"}])

    before = threading.active_count()
    stream = PromptBuilder(job("x", prompt={"column": "a"}), ["a"], CharacterCodec()).stream(endless())
    next(stream)
    assert read <= 6
    stream.close()
    assert threading.active_count() == before


class Weighed(CharacterCodec):
    """Notes how much text it is given in a call, and in all calls that run at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.together, self.most_together, self.calls = 0, 0, list[list[str]]()
        self._lock = threading.Lock()

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        size = sum(map(len, texts))
        with self._lock:
            self.calls.append(list(texts))
            self.together += size
            self.most_together = max(self.most_together, self.together)
        time.sleep(0.01)
        with self._lock:
            self.together -= size
        return super().encode_batch(texts, add_special_tokens)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.job.prompts.encoder.CHARACTERS_AT_ONCE", 10)
    monkeypatch.setattr("bulkrun.job.prompts.builder.CHARACTERS_AHEAD", 40)


@pytest.mark.usefixtures("little_memory")
def test_long_texts_are_tokenized_one_at_a_time_and_short_ones_some_together() -> None:
    codec = Weighed()
    builder = PromptBuilder(job("x", prompt={"column": "a"}), ["a"], codec)
    rows = ["ab", "cde", "fghij", "k", "x" * 19, "l", "y" * 19, "z" * 19]
    result = list(builder.stream([batch_of([{"a": row} for row in rows], 8 * number) for number in range(3)]))
    assert [[text(prompt) for prompt in prompts] for _, prompts in result] == [rows[:6], rows[6:]] * 3
    assert [batch.rows["a"].to_pylist() for batch, _ in result] == [rows[:6], rows[6:]] * 3
    assert [batch.position.row for batch, _ in result] == [0, 6, 8, 14, 16, 22] and result[-1][0].next.row == 24
    first = ["".join(call) for call in codec.calls[:1]]
    assert first == ["abcdefghij"] and all(len(call) == 1 or len("".join(call)) <= 10 for call in codec.calls)
    assert codec.most_together <= 19 + 10, "one long text, and beside it one portion"


@pytest.mark.usefixtures("little_memory")
def test_batches_of_long_texts_are_not_read_ahead() -> None:
    read = list[int]()

    def batches() -> Any:
        for number in range(9):
            read.append(number)
            yield batch_of([{"a": "x" * 30}], number)

    stream = PromptBuilder(job("x", prompt={"column": "a"}), ["a"], CharacterCodec()).stream(batches())
    next(stream)
    assert read == [0, 1]
    assert len(list(stream)) == 8
