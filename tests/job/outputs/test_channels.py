"""Outputs in channels: what was thought, called and answered comes apart, in every order and wherever it is cut."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.job.outputs.channels import split_channels
from bulkrun.job.outputs.thoughts import Thoughts
from bulkrun.job.outputs.tool_calls import split_calls

THOUGHT = "<|channel|>analysis<|message|>I need the weather.<|end|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}'
NEXT = "<|start|>assistant"


@pytest.mark.parametrize(
    "call",
    [
        CALL,
        f"{CALL}<|call|>",
        CALL.replace(" <|constrain|>json", "<|constrain|>json"),
        CALL.replace(" <|constrain|>json", " json"),
        CALL.replace(" <|constrain|>json", ""),
        CALL.replace("commentary", "analysis"),
        ' to=functions.weather<|channel|>commentary json<|message|>{"city": "Bern"}<|call|>',
        '<|channel|> to=functions.weather <|constrain|>json<|message|>{"city": "Bern"}',
    ],
)
@pytest.mark.parametrize("thought", [THOUGHT, ""])
def test_a_call_is_found_however_its_head_is_written(call: str, thought: str) -> None:
    reasoning, response = split_channels(f"{thought}{NEXT}{call}" if thought else call, is_ended=True)
    assert reasoning == ("I need the weather." if thought else None)
    split = split_calls(response or "", "harmony")
    assert split.response is None and [tuple(one) for one in split.calls] == [("weather", '{"city": "Bern"}')]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("<|channel|>final<|message|>It is warm.", Thoughts(None, "It is warm.")),
        (f"{THOUGHT}{NEXT}<|channel|>final<|message|>Warm.<|return|>", Thoughts("I need the weather.", "Warm.")),
        (
            f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}<|channel|>final<|message|>a\nb",
            Thoughts("I need the weather.\n" * 2, "a\nb"),
        ),
        ("<|channel|>commentary<|message|>Let me see.<|end|>", Thoughts(None, "Let me see.")),
        ("It is warm.", Thoughts(None, "It is warm.")),  # where the prompt has begun the answer
        ("", Thoughts(None, "")),
        ("<|channel|>analysis<|message|>I ne", Thoughts("I ne", None)),
        (f"{THOUGHT}{NEXT}<|channel|>fin", Thoughts("I need the weather.", None)),
        ("<|channel|>ana", Thoughts(None, None)),
    ],
)
def test_thoughts_and_answer_come_apart(text: str, wanted: Thoughts) -> None:
    reasoning = None if wanted.reasoning is None else wanted.reasoning.rstrip("\n")
    assert split_channels(text, is_ended=False) == (reasoning, wanted.response)


@pytest.mark.parametrize(
    "spelled", ["<|end|>", "a <|end|> b", "<|call|>, <|start|>user", "<|return|>\n<|message|> <|channel|>"]
)
def test_markers_that_are_only_spelled_stay_where_they_are(spelled: str) -> None:
    assert split_channels(f"<|channel|>final<|message|>{spelled}.", is_ended=True) == (None, f"{spelled}.")
    call = CALL.replace("Bern", json.dumps(spelled)[1:-1])
    _, response = split_channels(call, is_ended=True)
    [called] = split_calls(response or "", "harmony").calls
    assert json.loads(called.arguments) == {"city": spelled}


def test_what_is_said_before_a_call_stays_in_the_response() -> None:
    _, response = split_channels(
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>Let me see.<|end|>{NEXT}{CALL}", is_ended=True
    )
    split = split_calls(response or "", "harmony")
    assert (split.response, [call.name for call in split.calls]) == ("Let me see.", ["weather"])


@pytest.mark.parametrize("arguments", ['{"city": "B', "[1]", "Bern", '{"a": 1e999}', "{} and more"])
def test_what_is_no_call_stays_in_the_text(arguments: str) -> None:
    _, response = split_channels(CALL.replace('{"city": "Bern"}', arguments), is_ended=True)
    split = split_calls(response or "", "harmony")
    assert not split.calls and arguments in (split.response or "")


def test_a_call_that_is_whole_counts_though_its_output_was_cut_behind_it() -> None:
    _, response = split_channels(CALL, is_ended=False)
    assert [tuple(call) for call in split_calls(response or "", "harmony").calls] == [("weather", '{"city": "Bern"}')]


def test_no_arguments_are_none() -> None:
    _, response = split_channels(CALL.replace('{"city": "Bern"}', ""), is_ended=True)
    assert [tuple(call) for call in split_calls(response or "", "harmony").calls] == [("weather", "{}")]
    _, cut = split_channels(CALL.replace('{"city": "Bern"}', ""), is_ended=False)
    assert split_calls(cut or "", "harmony").calls == []


_TOKEN = re.compile(r"<\|\w+\|>|.", re.DOTALL)  # a marker is one


@given(cut=st.integers(0, 100), thought=st.text("ab \n"), city=st.text("é{} \n"))
def test_what_is_cut_loses_no_text(cut: int, thought: str, city: str) -> None:
    arguments = json.dumps({"city": city}, ensure_ascii=False)
    heads = [
        _TOKEN.findall("<|channel|>analysis<|message|>"),
        _TOKEN.findall(f"<|end|>{NEXT}{CALL[: CALL.index('{')]}"),
    ]
    tokens = [*heads[0], *thought, *heads[1], *arguments]
    reasoning, response = split_channels("".join(tokens[:cut]), is_ended=False)
    assert (reasoning or "") == thought[: max(0, cut - len(heads[0]))].strip()
    begin = len(tokens) - len(arguments)
    assert (response or "").partition("<|message|>")[2] == arguments[: max(0, cut - begin)]
