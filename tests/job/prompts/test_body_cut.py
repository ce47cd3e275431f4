"""vLLM's `truncate_prompt_tokens` and `truncation_side` of batch lines, through to the token ids that run.

What vLLM does is known: of a text that is continued the last tokens stay, of one that is embedded or scored the first,
`truncation_side` turns that, and -1 is what the model takes.
"""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.job.prompts.fit import fitter_of
from bulkrun.job.prompts.own_values import own_values
from bulkrun.request import RowError
from tests.job.plan.planning import BOS, CharacterCodec

CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
DIGITS = "0123456789"
CLASSIFY = {"task": "classify", "prompt": {"score_lines": True}, "classification": {"labels": ["LABEL_0"]}}
SECTIONS: dict[str, dict[str, Any]] = {
    EMBED: {"task": "embed", "prompt": {"text_lists": True}, "embedding": {"prompt": "doc: "}},
    SCORE: CLASSIFY,
    RERANK: CLASSIFY,
}


def run(url: str, max_model_len: int = 200, sections: dict[str, Any] | None = None, **body: Any) -> list[str] | str:
    """The texts that the line comes to, one for each text or pair of it; or the message of its error."""
    given = {"name": "cuts", "model": "m", "input": {"path": "x.jsonl", "id": "custom_id"}, "output": {"path": "out"}}
    spec = job_of({**given, **(sections or SECTIONS.get(url, {}))})
    row = {"custom_id": "a", "method": "POST", "url": url, "body": json.dumps(body)}
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([row]))
    [prompt] = PromptBuilder(spec, batch.rows.schema.names, CharacterCodec(chat=True)).build(batch)
    fitted = fit_prompt(fitter_of(spec, max_model_len), prompt)
    return fitted.message if isinstance(fitted, RowError) else _texts(fitted)


def _texts(prompt: Prompt) -> list[str]:
    parts = own_values(prompt.sampling.overrides).parts or (len(prompt.token_ids),)
    ids = iter(prompt.token_ids)
    return ["".join(chr(next(ids)) for _ in range(length)).replace(chr(BOS), "|") for length in parts]


@pytest.mark.parametrize(
    ("asked", "kept"),
    [
        ({"truncate_prompt_tokens": 6}, "|56789"),
        ({"truncate_prompt_tokens": 6, "truncation_side": "left"}, "|56789"),
        ({"truncate_prompt_tokens": 6.0, "truncation_side": "right"}, "|01234"),
        ({"truncate_prompt_tokens": 11}, "|0123456789"),
        ({"truncate_prompt_tokens": 1}, "9"),
        ({"truncate_prompt_tokens": 1, "truncation_side": "right"}, "|"),
        ({"truncate_prompt_tokens": None, "truncation_side": "right"}, "|0123456789"),
    ],
)
def test_a_completion_keeps_its_last_tokens_behind_its_first_special_one(asked: dict[str, Any], kept: str) -> None:
    assert run(COMPLETION, prompt=DIGITS, **asked) == [kept]


def test_token_ids_are_cut_as_they_are() -> None:
    assert run(COMPLETION, prompt=[*map(ord, DIGITS)], truncate_prompt_tokens=3) == ["789"]
    assert run(COMPLETION, prompt=[*map(ord, DIGITS)], truncate_prompt_tokens=3, truncation_side="right") == ["012"]


@pytest.mark.parametrize(("side", "kept"), [("left", "56789"), ("right", "01234")])
def test_a_chat_keeps_its_template_and_its_system_message(side: str, kept: str) -> None:
    messages = [{"role": "system", "content": "Judge."}, {"role": "user", "content": DIGITS}]
    frame = len("[system]Judge.\n[user]\n[assistant]")
    assert run(CHAT, messages=messages, truncate_prompt_tokens=frame + 5, truncation_side=side) == [
        f"[system]Judge.\n[user]{kept}\n[assistant]"
    ]


def test_what_the_model_takes_leaves_room_for_the_answer() -> None:
    """Whatever the job does with prompts that are too long; without the key that holds."""
    for on_too_long in ("error", "truncate_right"):
        job = {"run": {"on_too_long": on_too_long}}
        assert run(COMPLETION, 8, job, prompt=DIGITS, max_tokens=2, truncate_prompt_tokens=-1) == ["|56789"]
    assert run(COMPLETION, 12, prompt=DIGITS, max_tokens=1) == ["|0123456789"]
    assert run(COMPLETION, 8, prompt=DIGITS, max_tokens=2) == (
        "the prompt has 11 tokens and the model takes 8, output included; run.on_too_long can cut it"
    )


def test_what_is_cut_and_still_too_long_becomes_what_the_job_says() -> None:
    assert run(COMPLETION, 8, prompt=DIGITS, max_tokens=2, truncate_prompt_tokens=9) == (
        "the prompt has 9 tokens and the model takes 8, output included; run.on_too_long can cut it"
    )
    job = {"run": {"on_too_long": "truncate_right"}}
    assert run(COMPLETION, 8, job, prompt=DIGITS, max_tokens=2, truncate_prompt_tokens=9) == ["|23456"]


@pytest.mark.parametrize(("side", "kept"), [({}, "01"), ({"truncation_side": "left"}, "89")])
def test_each_text_that_is_embedded_keeps_its_first_tokens_behind_what_stands_before_it(
    side: dict[str, str], kept: str
) -> None:
    asked = {"truncate_prompt_tokens": len("|doc: ") + 2, **side}
    assert run(EMBED, input=DIGITS, **asked) == [f"|doc: {kept}"]
    assert run(EMBED, input=[DIGITS, "x"], **asked) == [f"|doc: {kept}", "|doc: x"]


@pytest.mark.parametrize(("side", "kept"), [({}, "01"), ({"truncation_side": "left"}, "89")])
def test_of_each_pair_the_second_text_is_cut(side: dict[str, str], kept: str) -> None:
    asked = {"truncate_prompt_tokens": 6, **side}
    assert run(SCORE, text_1="q", text_2=[DIGITS, "x"], **asked) == [f"|q|{kept}|", "|q|x|"]
    assert run(RERANK, query="q", documents=[DIGITS], **asked) == [f"|q|{kept}|"]
    assert run(RERANK, 6, query="q", documents=[DIGITS], **{**asked, "truncate_prompt_tokens": -1}) == [f"|q|{kept}|"]
    assert run(SCORE, text_1="q", text_2=DIGITS, truncate_prompt_tokens=4) == (
        "the first text takes 4 tokens with the special ones, and there is room for 4: none is left for the second; "
        "only the second text is cut"
    )


def test_of_two_texts_that_a_model_of_vectors_compares_each_is_cut() -> None:
    job = {**SECTIONS[EMBED], "prompt": {"score_lines": True}}
    assert run(SCORE, sections=job, text_1=DIGITS, text_2="x", truncate_prompt_tokens=8) == ["|doc: 01", "|doc: x"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"truncate_prompt_tokens": 0}, "body.truncate_prompt_tokens: 0 is neither -1 (what the model takes) nor a"),
        ({"truncate_prompt_tokens": -2}, "body.truncate_prompt_tokens: -2 is neither -1"),
        ({"truncate_prompt_tokens": True}, "body.truncate_prompt_tokens: True is not a whole number"),
        ({"truncate_prompt_tokens": "512"}, "body.truncate_prompt_tokens: '512' is not a whole number"),
        (
            {"truncate_prompt_tokens": 4, "truncation_side": "middle"},
            "body.truncation_side: 'middle' is not one of left",
        ),
        ({"truncation_side": ["left"]}, "body.truncation_side: ['left'] is not one of left, right"),
    ],
)
def test_anything_else_is_refused_by_name(asked: dict[str, Any], words: str) -> None:
    for url, body in ((COMPLETION, {"prompt": "x"}), (EMBED, {"input": "x"}), (SCORE, {"text_1": "q", "text_2": "d"})):
        assert str(run(url, **body, **asked)).startswith(words)


def test_a_response_says_it_in_openais_word() -> None:
    """As in vLLM, whatever the job does with prompts that are too long."""
    asked = {"instructions": "Judge.", "input": DIGITS, "max_output_tokens": 2}
    room = len("[system]Judge.\n[user]\n[assistant]") + 4 + 2
    for on_too_long in ("error", "truncate_right"):
        job = {"run": {"on_too_long": on_too_long}}
        assert run(RESPONSE, room, job, **asked, truncation="auto") == ["[system]Judge.\n[user]6789\n[assistant]"]
    assert run(RESPONSE, room, job, **asked, truncation="disabled") == ["[system]Judge.\n[user]0123\n[assistant]"]
    assert str(run(RESPONSE, room, **asked, truncation="disabled")).startswith("the prompt has ")
    assert run(RESPONSE, 99, **asked, truncation="auto") == [f"[system]Judge.\n[user]{DIGITS}\n[assistant]"]


def test_a_response_has_no_key_of_vllms() -> None:
    assert "body.truncate_prompt_tokens: 4: this parameter is not supported" in run(
        RESPONSE, input="x", truncate_prompt_tokens=4
    )
