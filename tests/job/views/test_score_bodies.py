"""The bodies of scores and ranks, written out here as vLLM's documentation and its response types have them."""

from __future__ import annotations

import json
from typing import Any

from bulkrun.job.views.openai_lines import BatchLines, LineMaker

DOCUMENTS = ["low", "high", "middle", "high too"]
SCORES = [0.125, 0.75, 0.5, 0.75]


def line_of(url: str, body: Any, scores: list[float] | None, **more: Any) -> BatchLines:
    row = {"row": 0, "sample": 0, "label": None, "score": None, "scores": scores, "prompt_tokens": 9, "url": url}
    row |= {"error_code": None, "error_message": None, "custom_id": "c", "body": body, **more}
    [line] = LineMaker("run", "model", 1_700_000_000, "custom_id", {}, task="classify").lines([row])
    return line


def body_of(url: str, body: Any) -> dict[str, Any]:
    output, error = line_of(url, body, SCORES)
    assert error is None and output is not None and output["custom_id"] == "c"
    assert output["response"]["status_code"] == 200
    made: dict[str, Any] = output["response"]["body"]
    return made


def ranked(**more: Any) -> list[Any]:
    made = body_of("/v1/rerank", json.dumps({"query": "q", "documents": DOCUMENTS, **more}))
    assert made.pop("id").startswith("rerank-")
    assert made == {
        "model": "model",
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
        "results": made["results"],
    }
    return list(made["results"])


def test_scores_are_in_the_order_of_their_pairs() -> None:
    made = body_of("/v1/score", "{}")
    assert made.pop("id").startswith("score-")
    assert made == {
        "object": "list",
        "created": 1_700_000_000,
        "model": "model",
        "data": [{"index": index, "object": "score", "score": score} for index, score in enumerate(SCORES)],
        "usage": {"prompt_tokens": 9, "total_tokens": 9, "completion_tokens": 0, "prompt_tokens_details": None},
    }


def test_documents_come_the_best_first_and_of_equal_ones_the_earlier() -> None:
    want = [
        {"index": at, "document": {"text": DOCUMENTS[at], "multi_modal": None}, "relevance_score": SCORES[at]}
        for at in (1, 3, 2, 0)
    ]
    assert ranked() == ranked(top_n=0) == ranked(top_n=9) == ranked(top_n=None, return_documents=True) == want
    assert ranked(top_n=3) == want[:3]


def test_documents_may_stay_away() -> None:
    assert ranked(top_n=1, return_documents=False) == [{"index": 1, "relevance_score": 0.75}]


def test_a_body_from_parquet_is_a_struct() -> None:
    one = {"query": "q", "documents": DOCUMENTS, "top_n": 1, "text_1": None}
    assert [result["index"] for result in body_of("/rerank/", one)["results"]] == [1]


def test_a_line_that_failed_is_an_error_line_alone() -> None:
    output, error = line_of("/v1/rerank", None, None, error_code="bad_input", error_message="body.query: missing")
    assert output is None and error is not None
    assert error["error"] == {"code": "bad_input", "message": "body.query: missing"}
