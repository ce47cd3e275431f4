"""Lines of vLLM's /v1/score and /v1/rerank: which pairs of texts they are, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError

from bulkrun.data.inputs.batch import InputBatch, Position
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.rows import fit_prompt
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.detect import BATCH_COLUMNS, describe_prompt
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.job.prompts.fit import OnTooLong, PromptFitter
from bulkrun.job.prompts.named_columns import named_columns
from bulkrun.job.prompts.own_values import own_values
from bulkrun.request import RowError
from tests.job.plan.planning import BOS, CharacterCodec, job

LINES = {"score_lines": True}
MADE = {"activation": "sigmoid", "labels": ["LABEL_0"]}  # as `prepare` leaves it, of a reranker


def spec_of(prompt: dict[str, Any] = LINES, **sections: Any) -> JobSpec:
    nowhere = {"input": {"path": "unused.jsonl"}, "output": {"path": "out"}}
    given = {"name": "ranks", "model": "m", "task": "classify", "prompt": prompt, "classification": MADE}
    return job_of({**given, **nowhere, **sections})


def line(url: str = "/v1/score", **body: Any) -> dict[str, Any]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": json.dumps({"model": "m", **body})}


def build(rows: Sequence[dict[str, Any]], spec: JobSpec | None = None) -> list[Prompt | RowError]:
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(list(rows)))
    return PromptBuilder(spec or spec_of(), batch.rows.schema.names, CharacterCodec(chat=True)).build(batch)


def joined(first: str, second: str) -> list[int]:
    return [BOS, *map(ord, first), BOS, *map(ord, second), BOS]


def pairs_of(prompt: Prompt | RowError) -> list[list[int]]:
    """The token ids of each pair, taken apart as an engine does."""
    assert isinstance(prompt, Prompt), prompt
    ids, cut = iter(prompt.token_ids), own_values(prompt.sampling.overrides).parts or (len(prompt.token_ids),)
    parts = [[next(ids) for _ in range(length)] for length in cut]
    assert next(ids, None) is None and (prompt.sampling.max_tokens, prompt.sampling.greedy) == (0, True)
    return parts


@pytest.mark.parametrize("url", ["/v1/score", "/score", "/v1/score/"])
@pytest.mark.parametrize(
    ("one", "other"),
    [("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2")],
)
def test_a_line_of_scores_is_one_with_each_or_text_by_text(one: str, other: str, url: str) -> None:
    asked = [("q", "d"), (["q"], "d"), ("q", ["d", "e"]), (["q"], ["d", "e", "d"]), (["q", "r"], ["d", "e"])]
    made = build([line(url, **{one: first, other: second}) for first, second in asked])
    assert list(map(pairs_of, made)) == [
        [joined("q", "d")],
        [joined("q", "d")],
        [joined("q", "d"), joined("q", "e")],
        [joined("q", "d"), joined("q", "e"), joined("q", "d")],
        [joined("q", "d"), joined("r", "e")],
    ]


@pytest.mark.parametrize("url", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_a_line_of_ranks_is_its_query_with_each_document(url: str) -> None:
    one, several = build([line(url, query="q", documents="d"), line(url, query="q", documents=["d", " e"], top_n=1)])
    assert pairs_of(one) == [joined("q", "d")] and pairs_of(several) == [joined("q", "d"), joined("q", " e")]


@pytest.mark.parametrize(
    "more",
    [
        {"use_activation": True, "softmax": True, "activation": None},
        {"user": "u", "priority": 3, "request_id": "r", "cache_salt": "s"},
        {
            "padding": None,
            "max_tokens_per_doc": 0,
            "chat_template_kwargs": {},
            "mm_processor_kwargs": {},
        },
    ],
)
def test_what_asks_for_nothing_else_is_taken(more: dict[str, Any]) -> None:
    rows = [line(text_1="q", text_2="d", **more), line("/rerank", query="q", documents=["d"], **more)]
    assert [pairs_of(made) for made in build(rows)] == [[joined("q", "d")]] * 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (line(), ["body: has no texts", "queries and documents", "text_1 and text_2"]),
        (line(text_1="q"), ["body: has text_1; /v1/score needs two of one kind"]),
        (line(text_1="q", documents="d"), ["body: has documents and text_1"]),
        (line(text_1="q", text_2="d", data_1="q", data_2="d"), ["body: has data_1 and data_2 and text_1 and text_2"]),
        (line(text_1=[], text_2="d"), ["body.text_1: [] holds no text"]),
        (line(text_1="q", text_2=["d", 5]), ["body.text_2, text 1: 5 is not text"]),
        (line(text_1=[[1, 2]], text_2="d"), ["body.text_1: [1, 2] is not text"]),
        (line(text_1="q", text_2={"content": []}), ["body.text_2: {'content': []} is not text"]),
        (line(text_1=["q", "r"], text_2="d"), ["body.text_1: 2 texts, and body.text_2 1;", "one for each"]),
        (line(text_1=["q", "r"], text_2=["d"] * 3), ["body.text_1: 2 texts, and body.text_2 3;"]),
        (line(text_1="q", text_2="\ud800"), ["body.text_2: it holds half a surrogate pair"]),
        (line(text_1="q", text_2="d", use_activation=False), ["body.use_activation: False", "sigmoid"]),
        (line(text_1="q", text_2="d", softmax="yes"), ["body.softmax: 'yes' is not true or false"]),
        (line(text_1="q", text_2="d", top_n=1), ["body.top_n: 1: this parameter is not supported"]),
        (line(text_1="q", text_2="d", padding="longest"), ["body.padding: 'longest'", "leave it out"]),
        (line(text_1="q", text_2="d", instruction="find"), ["body.instruction: 'find' is not supported"]),
        (line("/rerank", documents=["d"]), ["body.query: missing"]),
        (line("/rerank", query=["q"], documents=["d"]), ["body.query: ['q'] is not text"]),
        (line("/rerank", query="q"), ["body.documents: missing"]),
        (line("/rerank", query="q", documents=[{"text": "d"}]), ["body.documents: {'text': 'd'} is not text"]),
        (line("/rerank", query="q", documents=["d"], top_n=-1), ["body.top_n: -1 is not a whole number from 0 on"]),
        (line("/rerank", query="q", documents=["d"], top_n=True), ["body.top_n: True"]),
        (line("/rerank", query="q", documents=["d"], return_documents=1), ["body.return_documents: 1"]),
        (line("/v1/embeddings", input="a"), ["'/v1/embeddings' is not served; /v1/score and /v1/rerank are", "embed"]),
        ({**line(text_1="q", text_2="d"), "method": "GET"}, ["method: 'GET' is not served"]),
        ({**line(text_1="q", text_2="d"), "custom_id": None}, ["custom_id: missing"]),
    ],
)
def test_a_line_that_asks_for_something_else_is_bad_input_that_names_it(row: dict[str, Any], words: list[str]) -> None:
    error, good = build([row, line(text_1="q", text_2="d")])
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert all(word in error.message for word in words), error.message
    assert pairs_of(good) == [joined("q", "d")]


@pytest.mark.parametrize(
    ("body", "place"),
    [
        ({"query": " \n", "documents": ["d"]}, "body.query"),
        ({"query": "q", "documents": ["d", ""]}, "body.documents, text 1"),
    ],
)
def test_a_text_of_nothing_has_no_score(body: dict[str, Any], place: str) -> None:
    [error] = build([line("/rerank", **body)])
    assert error == RowError("empty_prompt", f"{place}: the text is empty")


class Refusing(CharacterCodec):
    """A tokenizer that has nothing for a text of x."""

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[list[int], int, int] | RowError]:
        refused = RowError("empty_prompt", "no tokens")
        made = super().encode_pairs(pairs)
        return [refused if pair[1] == "x" else ids for pair, ids in zip(pairs, made, strict=True)]


def test_what_a_tokenizer_refuses_is_an_error_of_its_line_that_says_which_pair() -> None:
    rows = [line(text_1="q", text_2=texts) for texts in (["d", "x"], "x", ["d", "e"])]
    batch = InputBatch(Position(0, 0), pa.RecordBatch.from_pylist(rows))
    several, single, good = PromptBuilder(spec_of(), batch.rows.schema.names, Refusing()).build(batch)
    assert several == RowError("empty_prompt", "pair 1: no tokens")
    assert single == RowError("empty_prompt", "no tokens")
    assert pairs_of(good) == [joined("q", "d"), joined("q", "e")]


@pytest.mark.parametrize(
    ("on_too_long", "kept"), [("truncate_right", "long"), ("truncate_left", "text"), ("error", None)]
)
def test_each_pair_is_fitted_by_itself(on_too_long: OnTooLong, kept: str | None) -> None:
    [prompt] = build([line(text_1="q", text_2=["d", "long text", "e"])])
    fitted = fit_prompt(PromptFitter(8, on_too_long), prompt)
    if kept is None:
        assert isinstance(fitted, RowError) and fitted.code == "too_long"
        assert fitted.message.startswith("pair 1: the prompt has 13 tokens and the model takes 8;")
    else:
        assert pairs_of(fitted) == [joined("q", text) for text in ("d", kept, "e")]
    assert pairs_of(fit_prompt(PromptFitter(13, on_too_long), prompt)) == pairs_of(prompt)


def test_the_same_tokens_in_other_pairs_are_another_prompt() -> None:
    split = "e" + chr(BOS) + chr(BOS) + "q"  # so that what is tokenized is one pair, or two
    one, two = build([line(text_1="q", text_2=text) for text in (split + chr(BOS) + "f", ["e", "f"])])
    assert isinstance(one, Prompt) and isinstance(two, Prompt) and one.token_ids == two.token_ids
    assert one.sampling != two.sampling


def test_a_query_that_is_there_for_each_document_costs_no_memory_for_all_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.job.prompts.builder.CHARACTERS_AHEAD", 300)
    body = {"query": "a long query", "documents": ["d"] * 10}  # 130 characters of pairs
    rows = pa.RecordBatch.from_pylist([dict.fromkeys(line()), *(line("/rerank", **body) for _ in range(7))])
    batch = InputBatch(Position(0, 5), rows, {0: RowError("bad_input", "no JSON"), 7: RowError("bad_input", "neither")})
    made = list(PromptBuilder(spec_of(), rows.schema.names, CharacterCodec()).stream([batch]))
    assert [len(prompts) for _, prompts in made] == [3, 2, 3]
    assert [(piece.position.row, [*piece.errors]) for piece, _ in made] == [(5, [0]), (8, []), (10, [2])]
    assert [isinstance(p, RowError) for _, prompts in made for p in prompts] == [True, *[False] * 6, True]


def test_a_batch_is_of_pairs_where_the_job_says_so() -> None:
    assert describe_prompt(spec_of(), BATCH_COLUMNS) == "lines of /v1/score and /v1/rerank: custom_id, url, body"
    with pytest.raises(JobFileError, match=r"With task: classify write prompt\.score_lines: true where its lines"):
        describe_prompt(spec_of({}), BATCH_COLUMNS)
    with pytest.raises(JobFileError, match=r"it has no url, body; it has: custom_id, text\. For pairs in columns"):
        describe_prompt(spec_of(), ["custom_id", "text"])


def test_a_model_of_several_labels_has_no_one_score() -> None:
    three = spec_of(classification={"labels": ["no", "maybe", "yes"]})
    with pytest.raises(JobFileError, match=r"'m' has 3 labels \(no, maybe, yes\), and a line asks for one score"):
        describe_prompt(three, BATCH_COLUMNS)


@pytest.mark.parametrize(
    ("prompt", "task", "said"),
    [
        ({**LINES, "column": "a"}, "classify", "score_lines: the lines' bodies bring the texts; leave out column"),
        ({**LINES, "text_pair": "{{ a }}"}, "classify", "leave out text_pair"),
        (
            {**LINES, "text_lists": True},
            "embed",
            "score_lines: the lines' bodies bring the texts; leave out text_lists",
        ),
        ({"text_pair": "{{ a }}"}, "embed", "prompt.text_pair: is for labels of pairs of texts, and this job makes"),
        (LINES, "generate", "prompt.score_lines: .* generates text; write task: classify, or leave it out"),
    ],
)
def test_it_goes_with_nothing_else(prompt: dict[str, Any], task: str, said: str) -> None:
    with pytest.raises((JobFileError, ValidationError), match=said):
        spec_of(prompt, task=task, classification={})


def test_an_input_without_rows_has_the_columns_of_lines() -> None:
    assert named_columns(spec_of()) == list(BATCH_COLUMNS)
    assert named_columns(spec_of(), ["text"]) == list(BATCH_COLUMNS)


def test_such_a_line_in_a_job_that_generates_says_which_job_it_is_for() -> None:
    [error] = build([line(text_1="q", text_2="d")], job("x", prompt={}))
    assert isinstance(error, RowError) and "a job with task: classify and prompt: {score_lines: true}" in error.message


def test_half_a_surrogate_pair_is_found_in_a_query_too() -> None:
    [error] = build([line("/rerank", query="\udc00", documents=["d"])])
    assert isinstance(error, RowError) and error.message.startswith("body.query: it holds half a surrogate pair")


def test_a_model_of_vectors_reads_each_text_by_itself() -> None:
    spec = spec_of(task="embed", classification={}, embedding={"prompt": "> "})
    rows = [line(queries=["a", "bb"], documents=["c", "d"]), line("/rerank", query="q", documents=["d"], softmax=False)]
    one, other = build(rows, spec)
    assert pairs_of(one) == [[BOS, *map(ord, f"> {text}")] for text in ("a", "c", "bb", "d")]
    assert pairs_of(other) == [[BOS, *map(ord, "> q")], [BOS, *map(ord, "> d")]]
    [error] = build([line(text_1="a", text_2="b", use_activation="no")], spec)
    assert isinstance(error, RowError) and "body.use_activation: 'no' is not true or false" in error.message
    [error] = build([line("/v1/embeddings", input="a")], spec)
    assert isinstance(error, RowError) and "/v1/score and /v1/rerank are" in error.message
