"""vLLM's /v1/score and /v1/rerank as lines of a batch: the pairs of texts to score, and whether the body asks for what
the job makes.

A side is a text or a list of them: one on the first side is paired with each on the second, lists of one length text
by text. How numbers become scores is the job's matter, because they share a column. Names are vLLM's, of its older and
newer versions, and the rerank body's `return_documents` Jina's and Cohere's. Knows bodies; knows no lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bulkrun.data.types.json_types import NOT_UNICODE, is_unicode
from bulkrun.job.jobfile.classification import ClassificationSpec
from bulkrun.job.prompts.body_keys import ACTIVATIONS, SIDES, BadBody, check_rerank_keys, check_score_keys, flag_of
from bulkrun.job.prompts.conversations import Ask, shown
from bulkrun.request import RowError


class Rerank(NamedTuple):
    """What a /v1/rerank body asks for beside its scores; `top_n`: that many of the best, 0: all."""

    documents: list[str]
    top_n: int
    returns_documents: bool


def read_score(body: Mapping[str, Any], made: ClassificationSpec | None) -> Ask | RowError:
    """The pairs that a /v1/score body without nulls asks about; `made`: how the job scores, None: by cosines.

    Raises BadBody, naming the key; a text of nothing is an `empty_prompt`.
    """
    check_score_keys(body)
    _check_activation(body, made)
    first, second = _sides_of(body)
    return _asking((first, _texts(body, first)), (second, _texts(body, second)))


def read_rerank(body: Mapping[str, Any], made: ClassificationSpec | None) -> Ask | RowError:
    """The same of a /v1/rerank body: the query with each document."""
    check_rerank_keys(body)
    _check_activation(body, made)
    asked = rerank_of(body)
    if not isinstance(query := body.get("query"), str):
        raise BadBody("body.query: missing" if query is None else f"body.query: {shown(query)} is not text")
    return _asking(("query", _texts(body, "query")), ("documents", asked.documents))


def rerank_of(body: Mapping[str, Any]) -> Rerank:
    """Which of a /v1/rerank body's documents its answer has, and how. Raises BadBody, naming the key."""
    if "documents" not in body:
        raise BadBody("body.documents: missing; /v1/rerank needs a list of texts")
    top_n, returned = body.get("top_n", 0), flag_of(body, "return_documents")
    if type(top_n) is not int or top_n < 0:
        raise BadBody(f"body.top_n: {shown(top_n)} is not a whole number from 0 on")
    return Rerank(_texts(body, "documents"), top_n, returns_documents=returned is not False)


def _sides_of(body: Mapping[str, Any]) -> tuple[str, str]:
    given = {key for sides in SIDES for key in sides if key in body}
    for sides in SIDES:
        if given == {*sides}:
            return sides
    ways = ", ".join(" and ".join(sides) for sides in SIDES)
    raise BadBody(f"body: has {' and '.join(sorted(given)) or 'no texts'}; /v1/score needs two of one kind: {ways}")


def _texts(body: Mapping[str, Any], key: str) -> list[str]:
    """The texts of one side. Raises BadBody for none, and for anything else."""
    given = body[key] if isinstance(body[key], list) else [body[key]]
    if not given:
        raise BadBody(f"body.{key}: [] holds no text")
    for index, text in enumerate(given):
        if not isinstance(text, str):
            raise BadBody(f"{_place(key, index, given)}: {shown(text)} is not text; only text can be read")
        if not is_unicode(text):
            raise BadBody(f"{_place(key, index, given)}: it holds {NOT_UNICODE}")
    return given


def _empty(key: str, texts: list[str]) -> RowError | None:
    """The error of the first text of nothing; None where all say something."""
    places = (_place(key, index, texts) for index, text in enumerate(texts) if not text.strip())
    return next((RowError("empty_prompt", f"{place}: the text is empty") for place in places), None)


def _asking(first: tuple[str, list[str]], second: tuple[str, list[str]]) -> Ask | RowError:
    """The pairs of two sides, each a key and its texts."""
    if (empty := _empty(*first) or _empty(*second)) is not None:
        return empty
    ones, others = first[1], second[1]
    if len(ones) == 1:
        ones = ones * len(others)
    if len(ones) != len(others):
        raise BadBody(
            f"body.{first[0]}: {len(ones)} texts, and body.{second[0]} {len(others)}; give one for all of the others, "
            "or one for each"
        )
    return Ask([], raw=True, pairs=tuple(zip(ones, others, strict=True)))


def _place(key: str, index: int, texts: list[Any]) -> str:
    return f"body.{key}" if len(texts) == 1 else f"body.{key}, text {index}"


def _check_activation(body: Mapping[str, Any], made: ClassificationSpec | None) -> None:
    """Raise BadBody where the body wants another form of the scores than the job makes, or says nothing that can be.

    A cosine has no activation, as in vLLM.
    """
    for key in ACTIVATIONS:
        wanted = flag_of(body, key)
        if made is not None and wanted is not None and wanted != (made.activation != "none"):
            raise BadBody(
                f"body.{key}: {wanted}, but the job's scores have the activation {made.activation} "
                "(classification.activation, for all lines)"
            )
