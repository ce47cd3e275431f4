"""From completions to records: what is an answer, what is not, and that no text is lost or made up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.outputs.parsing import OutputParser
from bulkrun.job.store.journal import JournalRecord
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.job.work.shard_work import Generation
from bulkrun.request import (
    Completion,
    Request,
    RowError,
    SamplingParams,
    StructuredOutput,
    Thinking,
    TokenLogprob,
    ToolCalls,
    ToolFormat,
)

THINKING = Thinking("<think>", "</think>")
SPECIAL = {
    900: "<eos>",
    901: "<think>",
    902: "</think>",
    903: "<|channel|>",
    904: "<|message|>",
    905: "<|end|>",
    906: "<|start|>",
    907: "<tool_call>",
    908: "</tool_call>",
    909: "[TOOL_CALLS]",
    910: "[ARGS]",
    911: "<|python_tag|>",
    912: "<TOOLCALL>",
    913: "</TOOLCALL>",
    914: "<|tool_call_start|>",
    915: "<|tool_call_end|>",
    916: "<|START_THINKING|>",
    917: "<|END_THINKING|>",
    918: "<|START_ACTION|>",
    919: "<|END_ACTION|>",
    920: "<|START_RESPONSE|>",
    921: "<|tool_call>",
    922: "<tool_call|>",
    923: '<|"|>',
    924: "<|channel>",
    925: "<channel|>",
}  # special tokens of a model that marks thoughts with them


def decode(batch: list[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
    """Token ids are code points, but for the special ones."""
    special = dict.fromkeys(SPECIAL, "") if skip_special_tokens else SPECIAL
    return ["".join(special.get(token, chr(token) if token not in SPECIAL else "") for token in ids) for ids in batch]


def ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def fields(names: Sequence[str]) -> list[pa.Field]:
    return [pa.field(name, pa.string()) for name in names]


def record(
    output: tuple[int, ...],
    finish_reason: str = "stop",
    *,
    prompt: tuple[int, ...] = (1, 2, 3),
    columns: Sequence[str] = (),
    sampling: SamplingParams | None = None,
    **completion: object,
) -> JournalRecord:
    request = Request("0:0", prompt, sampling or SamplingParams())
    done = Completion("0:0", output, finish_reason, **completion)  # type: ignore[arg-type]
    [made] = AnswerReader(decode, fields(columns)).records([Answer(Generation(request, 0, (0,), 0), done)])
    return made


def thinking(
    output: tuple[int, ...], finish_reason: str = "stop", thinking: Thinking = THINKING, **options: object
) -> JournalRecord:
    sampling = SamplingParams(thinking=thinking)
    return record(output, finish_reason, columns=["reasoning"], sampling=sampling, **options)  # type: ignore[arg-type]


def test_a_lone_surrogate_does_not_reach_parquet() -> None:
    assert record((97, 0xD83D, 98)).response == "a?b"


def test_trap_failure_turned_into_empty_text() -> None:
    """jobs.md section 6 (NS base.py): an empty generation and an error are distinguishable."""
    empty, failed = record(()), record((), "error", error=RowError("engine_error", "why"))
    assert (empty.response, empty.error_code, empty.finish_reason) == ("", None, "stop")
    assert (failed.response, failed.error_code, failed.finish_reason) == (None, "engine_error", "error")
    assert failed.prompt_tokens == 3


@pytest.mark.parametrize(
    ("code", "reason"), [("runaway", "repetition"), ("timeout", "timeout"), ("engine_error", "error")]
)
def test_text_generated_before_a_failure_is_kept_beside_its_error(code: str, reason: str) -> None:
    made = record(ids("so far"), reason, error=RowError(code, "why"), num_output_tokens=6)
    assert (made.response, made.error_code, made.error_message) == ("so far", code, "why")
    assert (made.finish_reason, made.completion_tokens) == (reason, 6)


def test_an_output_that_cannot_be_read_is_the_error_of_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr(OutputParser, "parse", broken)
    asked = SamplingParams(structured_outputs=StructuredOutput("json", "{}"))
    answers = [
        Answer(
            Generation(Request(f"{row}:0", (1,), sampling), 0, (row,), 0), Completion(f"{row}:0", ids("text"), "stop")
        )
        for row, sampling in enumerate([SamplingParams(), asked, SamplingParams()])
    ]
    records = AnswerReader(decode).records(answers)
    assert [(made.response, made.error_code) for made in records] == [
        ("text", None),
        ("text", "engine_error"),
        ("text", None),
    ]
    assert "IndexError: list index out of range" in str(records[1].error_message)


@given(
    lead=st.sampled_from(["", "<think>", "\n<think>\n"]),
    thoughts=st.text("ab <>\n/", max_size=20),
    answer=st.text("xy <>/", max_size=20),
    breaks=st.sampled_from(["", "\n", "\n\n"]),
)
def test_thoughts_and_answer_are_separated_and_nothing_is_lost(
    lead: str, thoughts: str, answer: str, breaks: str
) -> None:
    made = thinking(ids(f"{lead}{thoughts}</think>{breaks}{answer}"))
    assert made.response == answer
    assert made.extra["reasoning"] == (thoughts.strip("\r\n") if lead else thoughts.lstrip().strip("\r\n"))
    assert made.error_code is None


@given(st.text("ab\n", min_size=1, max_size=20), st.booleans(), st.sampled_from(["length", "stop"]))
def test_thoughts_without_an_end_are_no_answer(thoughts: str, in_prompt: bool, reason: str) -> None:
    prompt = ids("hello<think>\n") if in_prompt else ids("hello")
    output = ids(thoughts) if in_prompt else ids("<think>" + thoughts)
    made = thinking(output, reason, prompt=prompt, num_output_tokens=7)
    assert (made.response, made.error_code, made.finish_reason) == (None, "no_answer", reason)
    assert made.extra["reasoning"].strip() == thoughts.strip()
    assert "7 tokens" in str(made.error_message) and "sampling.thinking.max_tokens" in str(made.error_message)


def test_a_message_that_the_prompt_began_says_whether_its_output_is_thoughts() -> None:
    """Its prompt ends in the middle of them: nothing there tells."""
    within = THINKING._replace(begun="thoughts")
    made = thinking(ids("so on\n</think>\n\nyes"), prompt=ids("<think>\nand"), thinking=within)
    assert (made.extra["reasoning"], made.response, made.error_code) == ("so on", "yes", None)
    cut = thinking(ids("so on"), "length", prompt=ids("<think>\nand"), thinking=within)
    assert (cut.extra["reasoning"], cut.response, cut.error_code) == ("so on", None, "no_answer")
    special = thinking((*ids("so on"), 902, *ids("yes")), prompt=(901, *ids("and")), thinking=within)
    assert (special.extra["reasoning"], special.response) == ("so on", "yes")


@pytest.mark.parametrize("output", [" yes", "<think> is how it begins", " </think> is how it ends", "\n\nyes\n"])
def test_a_message_in_its_answer_goes_on_with_that_alone(output: str) -> None:
    answering = THINKING._replace(begun="answer")
    made = thinking(ids(output), prompt=ids("<think>a</think>It is"), thinking=answering)
    assert (made.response, made.extra, made.error_code) == (output, {}, None)


def test_an_answer_cut_before_its_first_character_is_no_answer() -> None:
    assert thinking(ids("<think>a</think>\n\n"), "length").error_code == "no_answer"
    silent = thinking(ids("<think>a</think>\n\n"), "stop")
    assert (silent.response, silent.error_code) == ("", None)


def test_a_model_that_does_not_think_has_an_answer_and_no_reasoning() -> None:
    made = thinking(ids("just so"), prompt=ids("what does <think> mean?"))
    assert (made.response, made.extra, made.error_code) == ("just so", {}, None)


def test_markers_that_are_special_tokens_separate_too() -> None:
    made = thinking((901, *ids("hm"), 902, *ids("\nyes")))
    assert (made.extra["reasoning"], made.response) == ("hm", "yes")
    told = thinking((901, *ids("hm"), 902, *ids("<think> begins, </think> ends")))
    assert (told.extra["reasoning"], told.response) == ("hm", "<think> begins, </think> ends")
    cut = thinking((901, *ids("hm")), "length")
    assert (cut.extra["reasoning"], cut.response, cut.error_code) == ("hm", None, "no_answer")
    begun = thinking(ids("hm"), "length", prompt=(1, 901, 10))
    assert (begun.extra["reasoning"], begun.error_code) == ("hm", "no_answer")


CHANNELS = Thinking("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
ANALYSIS, FINAL = (903, *ids("analysis"), 904), (905, 906, *ids("assistant"), 903, *ids("final"), 904)
CHANNEL_PROMPT = (906, *ids("user"), 904, *ids("hi"), 905, 906, *ids("assistant"))


@pytest.mark.parametrize(
    ("output", "reasoning", "response", "error"),
    [
        ((*ANALYSIS, *ids("hm\n"), *FINAL, *ids("yes final"), 900), "hm", "yes final", None),
        ((*ANALYSIS, *ids("analysis"), *FINAL, *ids("yes")), "analysis", "yes", None),
        ((*ANALYSIS, *ids("hm"), 905, 906, *ids("assistant"), *ANALYSIS, *ids("more"), *FINAL, *ids("yes")),
         "hm\nmore", "yes", None),
        ((*ANALYSIS, *ids("hm"), *FINAL[:12], *ids("commentary"), 904, *ids("So."), *FINAL, *ids("yes")),
         "hm", "So.\nyes", None),
        ((*FINAL[11:], *ids("at once")), None, "at once", None),
        ((*ANALYSIS, *ids("hm")), "hm", None, "no_answer"),
        ((*ANALYSIS, *ids("hm"), 905, 906, *ids("assist")), "hm", None, "no_answer"),
        ((*FINAL[11:], *ids("Say <|end|>, not <|start|>.\n")), None, "Say <|end|>, not <|start|>.\n", None),
        (ids("plain"), None, "plain", None),
    ],
)  # fmt: skip
def test_channels_whose_markers_are_special_and_other_tokens(
    output: tuple[int, ...], reasoning: str | None, response: str | None, error: str | None
) -> None:
    """As gpt-oss marks them, whose prompts end within the marker of an answer."""
    made = thinking(output, "length" if error else "stop", prompt=CHANNEL_PROMPT, thinking=CHANNELS)
    assert (made.extra.get("reasoning"), made.response, made.error_code) == (reasoning, response, error)


def test_a_prompt_may_begin_a_channel() -> None:
    begun = thinking((*ids("hm"), *FINAL, *ids("yes")), prompt=(*CHANNEL_PROMPT, *ANALYSIS), thinking=CHANNELS)
    assert (begun.extra["reasoning"], begun.response) == ("hm", "yes")
    answer = (903, *ids("final"), 904, *ids("So: "))
    told = thinking(ids("yes"), prompt=(*CHANNEL_PROMPT, *answer), thinking=CHANNELS)
    assert (told.extra, told.response) == ({}, "yes")


def test_an_answer_that_the_prompt_began_goes_on_as_it_is() -> None:
    prompt = (*CHANNEL_PROMPT, 903, *ids("final"), 904, *ids("So: "))
    goes_on = CHANNELS._replace(begun="answer")
    for said in ("\n\nyes", "<| is a bar", ""):
        made = thinking((*ids(said), 900), prompt=prompt, thinking=goes_on)
        assert (made.extra, made.response, made.error_code) == ({}, said, None)
    more = thinking((*ids("a\n"), 905, 906, *ids("assistant"), *ANALYSIS, *ids("hm")), prompt=prompt, thinking=goes_on)
    assert (more.extra["reasoning"], more.response) == ("hm", "a\n")


@pytest.mark.parametrize(
    ("reason", "stop", "calls"), [("stop", None, [("f", "{}")]), ("length", None, None), ("stop", "x", None)]
)
def test_a_call_of_gpt_oss_that_is_cut_before_its_arguments_is_none(reason: str, stop: Any, calls: Any) -> None:
    output = (903, *ids("commentary to=functions.f "), *ids("json"), 904, *ids("x" if stop else ""))
    sampling = SamplingParams(tool_calls=ToolCalls("harmony"), stop=("x",))
    made = record(output, reason, stop_reason=stop, columns=["tool_calls"], sampling=sampling)
    found = made.extra.get("tool_calls")
    assert (found and list(map(tuple, found))) == calls, made


def test_a_stop_string_ends_the_answer_after_special_markers_too() -> None:
    made = thinking((901, *ids("hm"), 902, *ids("\nyes\nQ")), stop_reason="\nQ")
    assert (made.extra["reasoning"], made.response) == ("hm", "yes")
    assert thinking((901, *ids("hm"), 902, *ids("Q")), stop_reason="Q").response == ""
    within = thinking((901, *ids("hm\nQ")), stop_reason="\nQ")
    assert (within.extra["reasoning"], within.response, within.error_code) == ("hm", None, "no_answer")


def test_a_failure_inside_the_thoughts_keeps_them_and_its_own_code() -> None:
    made = thinking(ids("<think>hm hm hm"), "repetition", error=RowError("runaway", "circles"))
    assert (made.response, made.error_code, made.extra["reasoning"]) == (None, "runaway", "hm hm hm")


def test_a_prompt_that_ends_the_thoughts_leaves_an_answer_only() -> None:
    made = thinking(ids("yes </think> no"), prompt=ids("q<think>\n\n</think>\n\n"))
    assert (made.response, made.extra, made.error_code) == ("yes </think> no", {}, None)


SCHEMA = StructuredOutput("json", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')


def test_trap_truncated_json_patched_by_adding_a_brace() -> None:
    """jobs.md section 6 (Curator): length-stopped JSON is flagged, raw kept."""
    sampling = SamplingParams(structured_outputs=SCHEMA)
    cut = record(ids('{"a": 12'), "length", sampling=sampling, columns=["parsed"])
    assert (cut.response, cut.finish_reason, cut.error_code) == ('{"a": 12', "length", "invalid_schema")
    assert "parsed" not in cut.extra
    whole = record(ids('{"a": 12}'), "length", sampling=sampling, columns=[])
    assert (whole.response, whole.error_code) == ('{"a": 12}', None)


def test_structure_is_asked_of_the_answer_and_not_of_the_thoughts() -> None:
    sampling = SamplingParams(structured_outputs=SCHEMA, thinking=THINKING)
    request = Request("0:0", (1,), sampling)
    done = Completion("0:0", ids('<think>{"b"</think>\n{"a": 1}'), "stop")
    columns = [pa.field("reasoning", pa.string()), pa.field("parsed", pa.struct([("a", pa.int64())]))]
    [made] = AnswerReader(decode, columns).records([Answer(Generation(request, 0, (0,), 0), done)])
    assert made.extra == {"reasoning": '{"b"', "parsed": {"a": 1}}
    assert (made.response, made.error_code) == ('{"a": 1}', None)


LOGPROBS = (TokenLogprob(97, -0.5, ((97, -0.5), (900, -1.5))), TokenLogprob(98, -0.25, ((98, -0.25), (97, -3.0))))


def test_logprobs_carry_the_text_of_every_token_special_ones_by_name() -> None:
    columns = ["logprobs", "prompt_logprobs", "cumulative_logprob"]
    made = record((97, 98), logprobs=LOGPROBS, prompt_logprobs=(None, TokenLogprob(99, -2.0)), columns=columns)
    assert [entry["token"] for entry in made.extra["logprobs"]] == ["a", "b"]
    assert made.extra["logprobs"][0]["top"] == [
        {"token_id": 97, "token": "a", "logprob": -0.5},
        {"token_id": 900, "token": "<eos>", "logprob": -1.5},
    ]
    assert made.extra["prompt_logprobs"] == [None, {"token_id": 99, "token": "c", "logprob": -2.0, "top": []}]
    assert made.extra["cumulative_logprob"] == -0.75


def test_the_tokens_are_those_of_the_whole_output_thoughts_too() -> None:
    written = ids("<think>hm</think>\nyes")
    made = record(written, sampling=SamplingParams(thinking=THINKING), columns=["prompt_token_ids", "token_ids"])
    assert made.response == "yes" and made.extra == {"prompt_token_ids": [1, 2, 3], "token_ids": list(written)}


def test_columns_that_the_job_does_not_ask_for_are_not_journaled() -> None:
    made = record((97, 98), logprobs=LOGPROBS, columns=["cumulative_logprob"])
    assert made.extra == {"cumulative_logprob": -0.75}


def test_a_token_keeps_the_space_that_its_tokenizer_drops_at_the_start_of_a_text() -> None:
    def drops_first_space(batch: list[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return ["".join(f" w{token}" for token in sequence).removeprefix(" ") for sequence in batch]

    calls = []

    def counted(batch: list[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        calls.append(len(batch))
        return drops_first_space(batch)

    reader = AnswerReader(counted, fields(["logprobs"]))
    done = Completion("0:0", (5, 6), "stop", logprobs=(TokenLogprob(5, -1.0), TokenLogprob(6, -1.0)))
    answer = Answer(Generation(Request("0:0", [1]), 0, (0,), 0), done)
    [made, _] = reader.records([answer, answer])
    assert [entry["token"] for entry in made.extra["logprobs"]] == [" w5", " w6"]
    assert calls == [4, 4], "one call for prompts and texts, one for the tokens, none for tokens that are known"


HERMES = ToolCalls("hermes")
CALL = '{"name": "f", "arguments": {"x": 1}}'
FOUND = ("f", '{"x": 1}')
NEMOTRON = (912, *ids(f"[{CALL}]"), 913, 900)
COHERE = (918, *ids('[{"tool_name": "f", "parameters": {"x": 1}}]'), 919, 900)
LFM = (914, *ids("[f(x=1)]"), 915, 900)


def calling(
    output: tuple[int, ...],
    finish_reason: str = "stop",
    calls: ToolCalls = HERMES,
    prompt: tuple[int, ...] = (1, 2, 3),
    **more: Any,
) -> Any:
    """The record of an answer in which calls are looked for."""
    sampling = SamplingParams(tool_calls=calls, **more)
    return record(output, finish_reason, prompt=prompt, columns=["tool_calls", "reasoning"], sampling=sampling)


@pytest.mark.parametrize(
    ("form", "output"),
    [
        ("hermes", (907, *ids(CALL), 908, 900)),
        ("hermes", (*ids(f"<tool_call>{CALL}</tool_call>"), 900)),
        ("llama3_json", (911, *ids(CALL), 900)),
        ("llama3_json", (*ids(CALL.replace("arguments", "parameters")), 900)),
        ("mistral", (909, *ids(f"[{CALL}]"), 900)),
        ("mistral", (909, *ids("f"), 910, *ids('{"x": 1}'), 900)),
        ("nemotron_json", NEMOTRON),
        ("nemotron_json", (*ids(f"<TOOLCALL>[{CALL}]</TOOLCALL>"), 900)),
        ("lfm2", LFM),
        ("cohere", COHERE),
    ],
)
def test_calls_are_found_whether_their_markers_are_special_tokens_or_text(
    form: ToolFormat, output: tuple[int, ...]
) -> None:
    made = calling(output, calls=ToolCalls(form))
    assert (made.response, made.finish_reason, made.error_code) == (None, "tool_calls", None)
    assert list(map(tuple, made.extra["tool_calls"])) == [FOUND]


def test_texts_show_no_other_special_tokens_and_those_without_calls_none() -> None:
    made = calling((901, *ids("so"), 907, *ids(CALL), 908, 905, *ids("long"), 900))
    assert (made.response, made.finish_reason) == ("solong", "tool_calls")
    plain = calling((*ids("so"), 905, *ids(" long"), 900))
    assert (plain.response, plain.finish_reason, plain.extra) == ("so long", "stop", {})
    unasked = record((907, *ids(CALL), 908), columns=["tool_calls"])
    assert (unasked.response, unasked.finish_reason, unasked.extra) == (CALL, "stop", {})


def test_a_cut_answer_keeps_its_whole_calls_and_its_end() -> None:
    made = calling((907, *ids(CALL), 908, 907, *ids('{"name":')), "length")
    assert (made.response, made.finish_reason) == ('<tool_call>{"name":', "length")
    assert list(map(tuple, made.extra["tool_calls"])) == [FOUND]


def test_where_calls_are_not_parallel_the_first_one_counts() -> None:
    made = calling((907, *ids(CALL), 908) * 3, calls=ToolCalls("hermes", parallel=False))
    assert (made.response, list(map(tuple, made.extra["tool_calls"]))) == (None, [FOUND])


def test_calls_in_thoughts_are_none() -> None:
    output = (901, *ids("or "), 907, *ids(CALL), 908, *ids("?"), 902, *ids("Hm. "), 907, *ids(CALL), 908, 900)
    made = calling(output, thinking=THINKING)
    assert (made.response, len(made.extra["tool_calls"])) == ("Hm.", 1)
    assert made.extra["reasoning"] == f"or <tool_call>{CALL}</tool_call>?"
    only = calling((901, *ids("or "), 902, 907, *ids(CALL), 908, 900), thinking=THINKING)
    assert (only.response, only.finish_reason, only.error_code) == (None, "tool_calls", None)


@pytest.mark.parametrize(("form", "call"), [("nemotron_json", NEMOTRON), ("lfm2", LFM)])
@pytest.mark.parametrize(
    ("prompt", "thoughts", "reasoning"),
    [
        ((1, 901, *ids("\n\n")), (*ids("or"), 902, *ids("\n\n")), "or"),  # as Nemotron's template begins them
        ((1, 901, 902), (), None),  # and as it ends them
        ((1,), (901, *ids("or"), 902), "or"),  # as LFM2.5 does itself
    ],
)
def test_calls_come_after_thoughts_whoever_begins_them(
    form: ToolFormat, call: tuple[int, ...], prompt: tuple[int, ...], thoughts: tuple[int, ...], reasoning: str | None
) -> None:
    made = calling((*thoughts, *call), calls=ToolCalls(form), prompt=prompt, thinking=THINKING)
    assert (made.response, made.finish_reason, made.error_code) == (None, "tool_calls", None)
    assert (list(map(tuple, made.extra["tool_calls"])), made.extra.get("reasoning")) == ([FOUND], reasoning)


def test_command_plans_in_its_own_markers_and_marks_its_answer() -> None:
    thinking = Thinking("<|START_THINKING|>", "<|END_THINKING|>")
    planned = calling((916, *ids("so"), 917, *COHERE), calls=ToolCalls("cohere"), thinking=thinking)
    assert (planned.response, planned.extra["reasoning"]) == (None, "so")
    assert list(map(tuple, planned.extra["tool_calls"])) == [FOUND]
    for begin, end in (((920,), ()), (ids("<|START_RESPONSE|>"), ids("<|END_RESPONSE|>"))):  # which are special or not
        said = calling((*begin, *ids("Hi."), *end, 900), calls=ToolCalls("cohere"), thinking=thinking)
        assert (said.response, said.finish_reason, said.extra) == ("Hi.", "stop", {})


def test_gemmas_thoughts_begin_with_a_special_token_and_a_word() -> None:
    thinking = Thinking("<|channel>thought", "<channel|>")
    call = (921, *ids("call:f{x:"), 923, *ids("a}"), 923, *ids("}"), 922, 900)
    made = calling((924, *ids("thought\nhm"), 925, *call), calls=ToolCalls("gemma4"), thinking=thinking)
    assert (made.response, made.extra["reasoning"]) == (None, "hm")
    assert list(map(tuple, made.extra["tool_calls"])) == [("f", '{"x": "a}"}')]
    ended = calling(ids("Hi."), prompt=(1, 924, *ids("thought\n"), 925), calls=ToolCalls("gemma4"), thinking=thinking)
    assert (ended.response, ended.extra) == ("Hi.", {})


BOUND = {"format": "hermes", "functions": [{"name": "f", "parameters": {"properties": {"x": {"type": "integer"}}}}]}


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ((907, *ids(CALL), 908), None),
        ((907, *ids(CALL[:-3])), "the output ends before its calls are complete"),
        ((907, *ids(CALL.replace("1", '"a"')), 908), "f: the arguments do not fit the parameters"),
        ((907, *ids(CALL.replace('"f"', '"g"')), 908), "calls 'g', which it may not"),
    ],
)
def test_calls_that_have_to_be_made_are_there_and_fit(output: tuple[int, ...], words: str | None) -> None:
    bound = StructuredOutput("tool_calls", json.dumps({**BOUND, "one": True}))
    made = calling(output, structured_outputs=bound)
    if words is None:
        assert (made.error_code, list(map(tuple, made.extra["tool_calls"]))) == (None, [FOUND])
    else:
        assert made.error_code == "invalid_schema" and words in str(made.error_message)
        assert "<tool_call>" in str(made.response) and "tool_calls" not in made.extra


def test_an_answer_bound_to_something_else_has_no_calls() -> None:
    text = f"<tool_call>{CALL}</tool_call>"
    made = calling(ids(text), structured_outputs=StructuredOutput("regex", ".*"))
    assert (made.response, made.finish_reason, made.extra) == (text, "stop", {})


def kept(output: tuple[int, ...], stop: int | str, columns: Sequence[str] = (), **sampling: Any) -> JournalRecord:
    params = SamplingParams(include_stop_str_in_output=True, **sampling)
    return record(output, columns=columns, sampling=params, stop_reason=stop, num_output_tokens=len(output))


def test_a_text_may_keep_the_stop_that_ended_it() -> None:
    assert kept(ids("One. T"), " T").response == "One. T"
    assert kept(ids("One"), ord(".")).response == "One."
    assert kept(ids("One"), 900).response == "One", "a special token has no text"


def test_thoughts_may_end_with_the_marker_that_is_the_stop() -> None:
    spelled = ids("<think>why")
    for output, stop in (((*spelled, *ids("</think>")), "</think>"), (spelled, 902), ((901, *ids("why")), 902)):
        made = kept(output, stop, ["reasoning"], thinking=THINKING)
        assert (made.response, made.error_code, made.extra) == ("", None, {"reasoning": "why"})
    inside = kept(ids("<think>why not"), "not", ["reasoning"], thinking=THINKING)
    assert (inside.response, inside.error_code, inside.extra) == (None, "no_answer", {"reasoning": "why not"})


@pytest.mark.parametrize(("end", "stop"), [(ids("</tool_call>"), "</tool_call>"), ((), 908)])
def test_a_call_is_whole_with_the_marker_that_is_the_stop(end: tuple[int, ...], stop: int | str) -> None:
    output = ids('<tool_call>{"name": "f", "arguments": {}}')
    made = kept((*output, *end), stop, ["tool_calls"], tool_calls=ToolCalls("hermes"))
    assert (made.response, made.finish_reason) == (None, "tool_calls")
    assert [call._asdict() for call in made.extra["tool_calls"]] == [{"name": "f", "arguments": "{}"}]


def test_a_structured_output_is_judged_with_the_stop_that_it_keeps() -> None:
    bound = StructuredOutput("json", json.dumps({"type": "array"}))
    for includes, code in ((True, None), (False, "invalid_schema")):
        params = SamplingParams(structured_outputs=bound, include_stop_str_in_output=includes)
        made = record(ids("[1, 2]"), sampling=params, stop_reason="]", progress="closed" if includes else "unfinished")
        assert (made.response, made.error_code) == ("[1, 2]" if includes else "[1, 2", code)


def test_log_probabilities_are_those_of_the_tokens_that_count() -> None:
    entries = tuple(TokenLogprob(token, -1.0) for token in ids("a"))
    params = SamplingParams(include_stop_str_in_output=True, logprobs=0)
    made = record(ids("a"), columns=["logprobs"], sampling=params, stop_reason=ord("b"), logprobs=entries)
    assert made.response == "ab" and [entry["token"] for entry in made.extra["logprobs"]] == ["a"]
