"""Prompts that come as token ids (`prompt.token_ids`): what a cell may hold, and what does not go with it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.job.prompts.fit import PromptFitter
from bulkrun.request import RowError
from tests.job.plan.planning import CharacterCodec, job

IDS = {"token_ids": "ids"}


def build(column: pa.Array, **sections: Any) -> list[Prompt | RowError]:
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_arrays([column], ["ids"]), {})
    builder = PromptBuilder(job("unused.jsonl", prompt=IDS, **sections), ["ids"], CharacterCodec(chat=True))
    assert builder.reads == ["ids"]
    return builder.build(batch)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint16(), 3)])
def test_the_model_is_given_a_list_as_it_is(kind: pa.DataType) -> None:
    one, other = build(pa.array([[5, 17, 4], [0, 1, 2]], kind))
    assert isinstance(one, Prompt) and isinstance(other, Prompt)
    assert (one.token_ids, other.token_ids) == ([5, 17, 4], [0, 1, 2]), "no template, nothing in front"


def test_in_a_column_of_text_a_list_is_json_and_its_numbers_may_be_whole_floats() -> None:
    one, other = build(pa.array(["[5, 17]", " [5, 17.0]"]))
    assert isinstance(one, Prompt) and isinstance(other, Prompt) and one.token_ids == other.token_ids == [5, 17]


@pytest.mark.parametrize(
    ("cells", "code", "words"),
    [
        (pa.array([None], pa.list_(pa.int64())), "bad_input", "column 'ids': null is not a list of token ids"),
        (pa.array([[]], pa.list_(pa.int64())), "empty_prompt", "the prompt has no tokens"),
        (pa.array([[5, None]]), "bad_input", "is not a list of token ids"),
        (pa.array([[5, -1]]), "bad_input", "-1 is no token id"),
        (pa.array([[2**31]]), "bad_input", "2147483648 is no token id"),
        (pa.array([[1.5]]), "bad_input", "is not a list of token ids"),
        (pa.array([[True]]), "bad_input", "is not a list of token ids"),
        (pa.array(["say hi"]), "bad_input", "is not a list of token ids"),
        (pa.array([7]), "bad_input", "is not a list of token ids"),
    ],
)
def test_anything_else_is_an_error_row(cells: pa.Array, code: str, words: str) -> None:
    [made] = build(cells)
    assert isinstance(made, RowError) and made.code == code and words in made.message


def test_ids_that_are_too_many_are_cut_like_any_prompt() -> None:
    [made] = build(pa.array([list(range(20))]), run={"on_too_long": "truncate_left"})
    assert isinstance(made, Prompt)
    fitted = fit_prompt(PromptFitter(12, "truncate_left"), made)
    assert isinstance(fitted, Prompt) and fitted.token_ids == list(range(20))[-6:], "half of the length is kept"


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"prompt": {**IDS, "system": "Be kind."}}, "leave out system"),
        ({"prompt": {**IDS, "system": "none"}}, "leave out system"),
        ({"prompt": {**IDS, "tools": "offered"}}, "leave out tools"),
        ({"prompt": {**IDS, "chat_template": "chat.jinja"}}, "leave out chat_template"),
        ({"prompt": {**IDS, "chat_template_kwargs": {"a": 1}}}, "leave out chat_template_kwargs"),
        ({"prompt": {**IDS, "continue_final_message": True}}, "leave out continue_final_message"),
        ({"prompt": {**IDS, "column": "text"}}, "needs one of template, messages, column, token_ids; has column and"),
        ({"prompt": {**IDS, "text_lists": True}}, "leave out token_ids"),
        ({"prompt": {**IDS, "score_lines": True}}, "leave out token_ids"),
        ({"task": "embed", "prompt": IDS}, "write prompt.column or prompt.template"),
        ({"task": "classify", "prompt": IDS}, "write prompt.column or prompt.template"),
    ],
)
def test_what_makes_a_text_does_not_go_with_it(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(JobFileError, match=words):
        job_of({"name": "a", "model": "m", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}, **sections})


def test_without_a_chat_template_is_how_they_are_taken_anyway() -> None:
    assert job("unused.jsonl", prompt={**IDS, "chat_template": "none"}).prompt.token_ids == "ids"


def test_a_column_that_is_not_there_is_told_before_any_row() -> None:
    with pytest.raises(JobFileError, match=r"prompt\.token_ids: the input has no column 'ids'; did you mean 'id'"):
        PromptBuilder(job("unused.jsonl", prompt=IDS), ["id"], CharacterCodec(chat=True))
