"""Texts to embed: as they are, with the model's special tokens at both ends, and nothing of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of as job_from
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.detect import describe_prompt, json_text_columns
from bulkrun.job.prompts.encoder import Prompt, RenderedPrompt
from bulkrun.job.prompts.fit import fitter_of
from bulkrun.job.prompts.own_values import own_values
from bulkrun.request import RowError
from tests.job.embedding_runs import embedding_job
from tests.job.plan.planning import CharacterCodec, job, write_jsonl

CLS, SEP = 1, 2


class TwoEnded(CharacterCodec):
    """A model that has a chat template and puts a token at both ends of a plain text."""

    def __init__(self) -> None:
        super().__init__(chat=True)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        ids = [[ord(character) for character in text] for text in texts]
        return [[CLS, *each, SEP] if add_special_tokens else each for each in ids]


def build(rows: Sequence[dict[str, Any]], **sections: Any) -> list[Prompt | RowError]:
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(list(rows)))
    spec = embedding_job(Path("unused.jsonl"), Path("out"), **{"input": {"path": "unused.jsonl"}, **sections})
    return PromptBuilder(spec, batch.rows.schema.names, TwoEnded()).build(batch)


def text(prompt: Prompt | RowError) -> str:
    assert isinstance(prompt, Prompt), prompt
    assert (prompt.token_ids[0], prompt.token_ids[-1]) == (CLS, SEP)
    return "".join(map(chr, prompt.token_ids[1:-1]))


@pytest.mark.parametrize("prompt", [{"column": "a"}, {"template": "{{ a }}"}, {"column": "a", "chat_template": "none"}])
def test_a_text_is_taken_as_it_is_behind_the_jobs_own(prompt: dict[str, Any]) -> None:
    made = build([{"a": "Hi "}, {"a": "[user]"}], prompt=prompt, embedding={"prompt": "query: "})
    assert list(map(text, made)) == ["query: Hi ", "query: [user]"]
    assert [(p.sampling.max_tokens, p.sampling.greedy) for p in made if isinstance(p, Prompt)] == [(0, True)] * 2
    assert text(build([{"a": "Hi"}], prompt=prompt, embedding={"prompt": ""})[0]) == "Hi"


def test_a_text_of_nothing_is_no_vector_whatever_stands_before_it() -> None:
    empty, null = build([{"a": " \n"}, {"a": None}], prompt={"column": "a"})
    assert isinstance(empty, RowError) and empty.code == "empty_prompt"
    assert isinstance(null, RowError) and null.code == "bad_input"


def test_columns_tell_texts_before_prompts_and_conversations_never() -> None:
    assert text(build([{"messages": "m", "prompt": "p", "text": "t"}], prompt={})[0]) == "doc: t"
    assert text(build([{"messages": "m", "prompt": "p"}], prompt={})[0]) == "doc: p"
    with pytest.raises(
        JobFileError, match=r"batch\), text, prompt\. It has: messages\. Set one of prompt\.template, p"
    ):
        build([{"messages": "m"}], prompt={})
    spec = embedding_job(Path("x"), Path("out"), prompt={})
    assert describe_prompt(spec, ["text", "messages"]) == "column 'text': text (detected)"


def fitted(content: str, room: int, on_too_long: str) -> list[int] | RowError:
    [prompt] = build([{"a": content}], prompt={"column": "a"}, run={"on_too_long": on_too_long})
    spec = embedding_job(Path("x"), Path("out"), run={"on_too_long": on_too_long})
    made = fit_prompt(fitter_of(spec, room), prompt)
    return made if isinstance(made, RowError) else made.token_ids


@pytest.mark.parametrize("on_too_long", ["error", "truncate_left", "truncate_right"])
def test_a_text_may_fill_the_models_length(on_too_long: str) -> None:
    assert fitted("x" * 10, 17, on_too_long) == [CLS, *map(ord, "doc: " + "x" * 10), SEP]


def test_a_longer_one_is_refused_or_cut_between_its_ends_and_behind_the_jobs_text() -> None:
    error = fitted("abcdefghij", 16, "error")
    assert isinstance(error, RowError) and error.code == "too_long"
    assert error.message == "the prompt has 17 tokens and the model takes 16; run.on_too_long can cut it"
    assert fitted("abcdefghij", 12, "truncate_right") == [CLS, *map(ord, "doc: abcde"), SEP]
    assert fitted("abcdefghij", 12, "truncate_left") == [CLS, *map(ord, "doc: fghij"), SEP]


def line(url: str = "/v1/embeddings", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": json.dumps({"model": "m", **body})}


def asked(row: dict[str, Any], **sections: Any) -> Prompt | RowError:
    [made] = build([row], prompt={}, **sections)
    return made


@pytest.mark.parametrize(
    "body",
    [
        {"input": "Hi"},
        {"input": ["Hi"]},
        {"input": "Hi", "dimensions": 8, "encoding_format": "base64", "user": "u"},
        {"input": "Hi", "dimensions": None, "encoding_format": "float", "add_special_tokens": True},
    ],
)
def test_a_line_of_openais_embeddings_is_its_text(body: dict[str, Any]) -> None:
    assert text(asked(line(**body))) == "doc: Hi"


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (line(), ["body.input: missing"]),
        (line(input=["a", "b"]), ["body.input: 2 inputs in one line", "set prompt.text_lists: true"]),
        (line(input=[1, 2]), ["body.input: token ids", "send text"]),
        (line(input=[[1, 2], [3]]), ["body.input: token ids"]),
        (line(input=[]), ["body.input: [] is not text"]),
        (line(input="a", dimensions=16), ["body.dimensions: 16", "have 8", "embedding.dimensions"]),
        (line(input="a", dimensions=True), ["body.dimensions: True"]),
        (line(input="a", encoding_format="int8"), ["body.encoding_format: 'int8'", "float, base64"]),
        (line(input="a", temperature=0), ["body.temperature: 0", "not supported"]),
        (line(input="a", add_special_tokens=False), ["body.add_special_tokens: False", "leave it out"]),
        (line("/v1/completions", prompt="a"), ["url: '/v1/completions' is not served; /v1/embeddings is", "generate"]),
        (line("/v1/images", prompt="a"), ["url: '/v1/images' is not served; /v1/embeddings is"]),
    ],
)
def test_a_line_that_asks_for_something_else_is_bad_input_that_names_it(row: dict[str, Any], words: list[str]) -> None:
    error = asked(row)
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert all(word in error.message for word in words), error.message


def test_a_line_of_embeddings_in_a_job_that_generates_says_which_job_it_is_for() -> None:
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([line(input="a")]))
    builder = PromptBuilder(job("x", prompt={}), batch.rows.schema.names, CharacterCodec(chat=True))
    [error] = builder.build(batch)
    assert isinstance(error, RowError) and "a job with task: embed" in error.message


def texts(prompt: Prompt | RowError) -> list[str]:
    """Those of a row that may have several."""
    assert isinstance(prompt, Prompt), prompt
    parts = prompt.parts or (prompt,)
    assert prompt.token_ids == [token for part in parts for token in part.token_ids]
    assert own_values(prompt.sampling.overrides).parts == tuple(len(part.token_ids) for part in prompt.parts)
    return list(map(text, parts))


LISTS = {"prompt": {"column": "a", "text_lists": True}, "embedding": {"prompt": "doc: "}}


def test_a_row_may_have_several_texts_each_behind_the_jobs_own() -> None:
    assert texts(build([{"a": ["Hi", "Ho "]}], **LISTS)[0]) == ["doc: Hi", "doc: Ho "]
    assert texts(build([{"a": ["Hi"]}], **LISTS)[0]) == texts(build([{"a": "Hi"}], **LISTS)[0]) == ["doc: Hi"]
    assert texts(build([{"a": ' ["Hi", "Ho"]'}], **LISTS)[0]) == ["doc: Hi", "doc: Ho"], "as a CSV has them"
    for given in ('["Hi", ', '{"Hi": ["Ho"]}', "[Hi](Ho)", ['["Hi", "Ho"]']):
        alone = given if isinstance(given, str) else given[0]
        assert texts(build([{"a": given}], **LISTS)[0]) == [f"doc: {alone}"]
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([{"a": ["Hi", "Ho "]}]))
    spec = embedding_job(Path("unused.jsonl"), Path("out"), **{"input": {"path": "unused.jsonl"}, **LISTS})
    [rendered] = PromptBuilder(spec, ["a"], TwoEnded()).render(batch)
    assert isinstance(rendered, RenderedPrompt) and rendered.size == len("doc: Hidoc: Ho "), (
        "what waits is bounded by it"
    )
    several, one = build([{"a": ["Hi", "Hi"]}, {"a": ["HiHi"]}], **LISTS)
    assert texts(several) == ["doc: Hi"] * 2 and texts(one) == ["doc: HiHi"]


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ([], "empty_prompt", "column 'a': [] holds no text"),
        (["Hi", " "], "empty_prompt", "column 'a', text 1: the text is empty"),
        (["Hi", None], "bad_input", "column 'a', text 1: null is not text"),
        (None, "bad_input", "column 'a': null is not text"),
    ],
)
def test_a_row_with_a_text_that_says_nothing_is_an_error_that_names_it(value: Any, code: str, words: str) -> None:
    _, error = build([{"a": ["Hi"]}, {"a": value}], **LISTS)
    assert isinstance(error, RowError) and (error.code, error.message) == (code, words)


def test_a_list_comes_as_json_where_the_column_is_text() -> None:
    made = build([{"a": '["Hi", "Ho"]'}, {"a": "[sic] Hi"}, {"a": '["[\\"Hi\\"]"]'}], **LISTS)
    assert list(map(texts, made)) == [["doc: Hi", "doc: Ho"], ["doc: [sic] Hi"], ['doc: ["Hi"]']]
    openai = build([line(input='["Hi", "Ho"]')], prompt={"text_lists": True}, embedding={"prompt": "doc: "})
    assert list(map(texts, openai)) == [['doc: ["Hi", "Ho"]']]


def test_lines_may_have_texts_in_some_rows_and_lists_in_others(tmp_path: Path) -> None:
    """However rare either is: one type for the column would refuse it."""
    for few, many in (("one text", ["a", "b"]), (["a", "b"], "one text")):
        path = write_jsonl(tmp_path / "in.jsonl", [{"text": few}, *[{"text": many}] * 30])
        for prompt in ({"column": "text", "text_lists": True}, {"text_lists": True}):
            spec = embedding_job(path, Path("out"), input={"path": str(path)}, prompt=prompt)
            with open_input(str(path), kept_as_text=partial(json_text_columns, spec)) as dataset:
                [batch] = dataset.batches()
            assert not batch.errors
            made = PromptBuilder(spec, dataset.schema.names, TwoEnded()).build(batch)
            assert [len(texts(each)) for each in made] == [len(few) if isinstance(few, list) else 1] + [
                len(many) if isinstance(many, list) else 1
            ] * 30


def test_of_many_texts_nothing_is_kept_but_the_texts() -> None:
    """A batch of short ones has hundreds of thousands."""
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist([{"a": [f"{n}" for n in range(2000)]}]))
    builder = PromptBuilder(embedding_job(Path("x"), Path("out"), input={"path": "x"}, **LISTS), ["a"], TwoEnded())
    [made] = builder.render(batch)
    assert isinstance(made, RenderedPrompt) and len({id(each.frame) for each in made.texts}) == 1


def test_a_list_in_a_column_of_text_that_is_none_of_texts_says_how_such_a_text_is_written() -> None:
    fix = "if this very text is meant, put it in a list: "
    null, none = build([{"a": '["Hi", null]'}, {"a": "[]"}], **LISTS)
    assert null == RowError("bad_input", f"column 'a', text 1: null is not text; {fix}" + r"""'["[\\"Hi\\", null]"]'""")
    assert none == RowError("empty_prompt", f"column 'a': [] holds no text; {fix}" + """'["[]"]'""")


def test_each_of_several_texts_is_cut_for_itself() -> None:
    sections = {**LISTS, "run": {"on_too_long": "truncate_right"}}
    [made] = build([{"a": ["abcdefghij", "Hi"]}], **sections)
    spec = embedding_job(Path("x"), Path("out"), **{"input": {"path": "x"}, **sections})
    assert texts(fit_prompt(fitter_of(spec, 12), made)) == ["doc: abcde", "doc: Hi"]
    error = fit_prompt(fitter_of(embedding_job(Path("x"), Path("out"), input={"path": "x"}), 12), made)
    assert isinstance(error, RowError) and error.message.startswith("text 0: the prompt has 17 tokens and the model")


def test_a_line_of_openais_embeddings_may_have_a_list_where_the_job_takes_lists() -> None:
    sections = {"embedding": {"prompt": "doc: "}}

    def made(given: Any) -> Prompt | RowError:
        [one] = build([line(input=given)], prompt={"text_lists": True}, **sections)
        return one

    assert texts(made(["Hi", "Ho"])) == ["doc: Hi", "doc: Ho"] and texts(made("Hi")) == ["doc: Hi"]
    for given in ([1, 2], [[1, 2], [3]]):
        error = made(given)
        assert isinstance(error, RowError) and "body.input: token ids" in error.message
    error = made(["Hi", ""])
    assert isinstance(error, RowError) and error.message == "body.input, text 1: the text is empty"


def test_a_list_of_texts_where_one_is_wanted_says_how_lists_are_taken() -> None:
    [error] = build([{"a": ["Hi", "Ho"]}], prompt={"column": "a"})
    assert isinstance(error, RowError) and "prompt.text_lists: true" in error.message


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": "generate", "prompt": {"column": "a", "text_lists": True}}, "write task: embed"),
        ({"task": "classify", "prompt": {"column": "a", "text_lists": True}}, "write task: embed"),
        ({"prompt": {"template": "{{ a }}", "text_lists": True}}, "leave out template"),
    ],
)
def test_lists_are_for_vectors_of_a_column_or_a_batch(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(JobFileError, match=r"text_lists: .*" + words):
        job_from(
            {"name": "n", "model": "m", "input": {"path": "x"}, "output": {"path": "o"}, "task": "embed", **sections}
        )
