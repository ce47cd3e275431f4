"""Pairs of texts: the second from a template, joined by the tokenizer, and cut alone where both are too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts import encoder as encoder_module
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.job.prompts.fit import OnTooLong, PromptFitter, PromptFrame
from bulkrun.request import RowError
from tests.job.plan.planning import BOS, CharacterCodec

NOWHERE = {"input": {"path": "unused.jsonl"}, "output": {"path": "out"}}
PAIR = {"column": "a", "text_pair": "{{ b }}"}


def build(rows: Sequence[dict[str, Any]], prompt: dict[str, Any] = PAIR) -> list[Prompt | RowError]:
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(list(rows)))
    spec = job_of({"name": "pairs", "model": "m", "task": "classify", "prompt": prompt, **NOWHERE})
    return PromptBuilder(spec, batch.rows.schema.names, CharacterCodec(chat=True)).build(batch)


def joined(first: str, second: str) -> list[int]:
    return [BOS, *map(ord, first), BOS, *map(ord, second), BOS]


@pytest.mark.parametrize("first", [{"column": "a"}, {"template": "{{ a }}"}])
def test_both_texts_are_joined_by_the_tokenizer_in_the_rows_order(first: dict[str, Any]) -> None:
    rows = [{"a": "q", "b": "d"}, {"a": "long", "b": ""}, {"a": "q2", "b": " d2"}]
    one, error, other = build(rows, {**first, "text_pair": "{{ b }}"})
    assert isinstance(one, Prompt) and isinstance(other, Prompt) and isinstance(error, RowError)
    assert (one.token_ids, other.token_ids) == (joined("q", "d"), joined("q2", " d2"))
    assert (one.sampling.max_tokens, one.sampling.greedy) == (0, True)


@pytest.mark.parametrize(
    ("second", "code", "message"),
    [
        ("", "empty_prompt", "prompt.text_pair: the second text is empty"),
        (" \n", "empty_prompt", "prompt.text_pair: the second text is empty"),
        (None, "bad_input", "prompt.text_pair: prints 'b', which is null"),
    ],
)
def test_a_row_without_a_second_text_is_an_error_that_names_the_key(second: Any, code: str, message: str) -> None:
    _, error = build([{"a": "q", "b": "d"}, {"a": "q", "b": second}])
    assert isinstance(error, RowError) and error.code == code and error.message.startswith(message)


def test_half_a_surrogate_pair_and_a_template_that_fails_are_errors_of_their_rows() -> None:
    escaped, failed = (build([{"a": "q", "b": "d"}], {**PAIR, "text_pair": text})[0] for text in
                       ("{{ '\\ud800' }}", "{{ 1 // 0 }}"))  # fmt: skip
    assert isinstance(escaped, RowError) and isinstance(failed, RowError)
    assert (escaped.code, failed.code) == ("bad_input", "bad_template")
    assert all(error.message.startswith("prompt.text_pair: ") for error in (escaped, failed))


def test_one_of_the_two_may_be_the_same_in_every_row() -> None:
    for prompt in ({"template": "always", "text_pair": "{{ b }}"}, {"column": "a", "text_pair": "always"}):
        [made] = build([{"a": "q", "b": "d"}], prompt)
        assert isinstance(made, Prompt) and len(made.token_ids) == len("always") + 4
    with pytest.raises(JobFileError, match="uses no column of the input"):
        build([{"a": "q"}], {"template": "always", "text_pair": "the same"})


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"column": "a", "text_pair": "about { b }"}, r"prompt\.text_pair: .*; write \{\{ b \}\} for \{b\}"),
        ({"template": "{a}", "text_pair": "{{ b }}"}, r"prompt\.template: .*; write \{\{ a \}\} for \{a\}"),
    ],
)
def test_a_column_in_single_braces_is_no_fixed_text(prompt: dict[str, str], message: str) -> None:
    """Every row would be compared with the same braces, and have a score."""
    with pytest.raises(JobFileError, match=message):
        build([{"a": "q", "b": "d"}], prompt)
    assert isinstance(build([{"a": "q", "b": "d"}], {"column": "a", "text_pair": "{c} and {{ b }}"})[0], Prompt)


def test_a_column_that_is_not_there_and_a_bad_template_are_the_jobs_errors() -> None:
    with pytest.raises(JobFileError, match=r"prompt\.text_pair: no column 'nowhere'; the input has: a, b"):
        build([{"a": "q", "b": "d"}], {**PAIR, "text_pair": "{{ nowhere }}"})
    with pytest.raises(JobFileError, match=r"prompt\.text_pair: template line 1"):
        build([{"a": "q", "b": "d"}], {**PAIR, "text_pair": "{{ b"})


def test_long_pairs_are_tokenized_a_portion_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "CHARACTERS_AT_ONCE", 20)
    sizes: list[list[int]] = []
    encode = CharacterCodec.encode_pairs

    def counted(codec: CharacterCodec, pairs: Sequence[tuple[str, str]]) -> Any:
        sizes.append([len(first) + len(second) for first, second in pairs])
        return encode(codec, pairs)

    monkeypatch.setattr(CharacterCodec, "encode_pairs", counted)
    made = build([{"a": "q" * size, "b": "d" * size} for size in (3, 4, 5, 30, 1)])
    assert sizes == [[6, 8], [10], [60], [2]] and len(made) == 5


def fitted(first: str, second: str, room: int, on_too_long: OnTooLong) -> list[int] | RowError:
    [prompt] = build([{"a": first, "b": second}])
    made = fit_prompt(PromptFitter(room, on_too_long), prompt)
    return made if isinstance(made, RowError) else made.token_ids


@given(st.text("ab", min_size=1, max_size=9), st.text("abc", min_size=1, max_size=20), st.integers(2, 40))
def test_the_second_text_alone_is_cut(first: str, second: str, room: int) -> None:
    """Also where both begin or end alike."""
    left = room - len(first) - 3
    for on_too_long in ("truncate_right", "truncate_left"):
        made = fitted(first, second, room, on_too_long)
        if left < 1:
            assert isinstance(made, RowError) and made.code == "too_long"
            assert f"takes {len(first) + 3} tokens" in made.message and f"room for {room}:" in made.message
        else:
            kept = second[:left] if on_too_long == "truncate_right" else second[-left:]
            assert made == joined(first, kept)


def test_without_cutting_a_pair_is_too_long_as_any_text() -> None:
    assert fitted("q", "d" * 4, 8, "error") == joined("q", "d" * 4)
    error = fitted("q", "d" * 5, 8, "error")
    assert isinstance(error, RowError) and error.message.startswith("the prompt has 9 tokens and the model takes 8")


def test_the_frame_of_a_pair_is_all_but_the_second_text() -> None:
    assert PromptFrame.around_second([1, 2, 3, 4, 5], 2, 4) == PromptFrame([1, 2], [5], of_pair=True)
