"""The bodies of vLLM's answers to /v1/score and /v1/rerank, but for their heads. Knows the format; knows no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.prompts.body_keys import RERANK_URLS
from bulkrun.job.prompts.openai_batch import read_body
from bulkrun.job.prompts.score_lines import rerank_of

Row = Mapping[str, Any]  # one that did not fail


def is_rerank(row: Row) -> bool:
    """Whether the line was one of /v1/rerank."""
    return str(row["url"]).rstrip("/") in RERANK_URLS


def score_body(row: Row) -> dict[str, Any]:
    """A score for each pair, in the line's order."""
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(row["scores"])]
    return {
        "object": "list",
        "data": data,
        "usage": {**_usage(row), "completion_tokens": 0, "prompt_tokens_details": None},
    }


def rerank_body(row: Row) -> dict[str, Any]:
    """The documents, the best first and of equal ones the earlier; all, or as many as the line asked for."""
    asked, scores = rerank_of(read_body(row["body"])), row["scores"]
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in ranked[: asked.top_n or None]:
        document = {"document": {"text": asked.documents[index], "multi_modal": None}}
        shown = document if asked.returns_documents else {}
        results.append({"index": index, **shown, "relevance_score": scores[index]})
    return {"usage": _usage(row), "results": results}


def _usage(row: Row) -> dict[str, Any]:
    return {"prompt_tokens": row["prompt_tokens"], "total_tokens": row["prompt_tokens"]}
