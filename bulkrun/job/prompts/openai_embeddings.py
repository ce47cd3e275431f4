"""OpenAI's /v1/embeddings as lines of a batch: the texts to embed, and whether the body asks for what the job makes.

How long vectors are is the job's matter, because they share a column. Names are OpenAI's and, for what OpenAI has not,
vLLM's. Knows bodies; knows no lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.jobfile.embedding import EmbeddingSpec
from bulkrun.job.prompts.body_keys import EMBEDDINGS_URL, BadBody, check_embedding_keys
from bulkrun.job.prompts.body_text import one_text
from bulkrun.job.prompts.conversations import Ask, shown
from bulkrun.job.prompts.text_lists import asked_texts
from bulkrun.request import RowError

_FORMATS = ("float", "base64")
_SEVERAL = "set prompt.text_lists: true in the job file (the column embeddings has a vector of each then)"


def read_embedding(body: Mapping[str, Any], embedding: EmbeddingSpec, *, lists: bool) -> Ask | RowError:
    """What a body without nulls asks; `lists`: it may be several texts. Raises BadBody, naming the key."""
    if "input" not in body:
        raise BadBody(f"body.input: missing; {EMBEDDINGS_URL} needs a text")
    check_embedding_keys(body)
    if (wanted := body.get("encoding_format", "float")) not in _FORMATS:
        raise BadBody(f"body.encoding_format: {shown(wanted)} is not one of {', '.join(_FORMATS)}")
    _check_dimensions(body, embedding.dimensions)
    _refuse_token_ids(body["input"])
    if lists:
        return asked_texts("body.input", body["input"])
    return Ask([{"role": "user", "content": one_text("input", body["input"], _SEVERAL)}], raw=True)


def _refuse_token_ids(value: Any) -> None:
    """Of a list of them, or of lists of them: clients make them with a tokenizer of OpenAI's."""
    listed = value if isinstance(value, list) else []
    ids = [token for each in listed for token in (each if isinstance(each, list) else [each])]
    if ids and all(isinstance(token, int) for token in ids):
        what = "token ids are not supported, as they belong to another model's tokenizer; send text"
        raise BadBody(f"body.input: {what}")


def _check_dimensions(body: Mapping[str, Any], made: int | None) -> None:
    wanted = body.get("dimensions", made)
    if wanted != made or isinstance(wanted, bool):
        many = "those of the model" if made is None else str(made)
        raise BadBody(
            f"body.dimensions: {shown(wanted)}, but the job's vectors have {many} (embedding.dimensions, for all lines)"
        )
