"""OpenAI batch lines: `custom_id`, `method`, `url`, `body`, run as they are by the job's own model.

Served are POST /v1/chat/completions, /v1/responses and /v1/completions, by a job that embeds /v1/embeddings, by one
that scores pairs vLLM's /v1/score and /v1/rerank. A parameter that changes the answer is honoured or the row is a
`bad_input` that names it; one that only concerns OpenAI's service (accounting, caching, hints to its own models) is
ignored. So is `model`, unless the job has adapters for it to name. Knows the format; `openai_chat`, `openai_responses`,
`openai_embeddings` and `score_lines` know the bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.job.jobfile.tools import NONE
from bulkrun.job.prompts.body_cut import cut_of
from bulkrun.job.prompts.body_keys import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URLS,
    RESPONSES_URL,
    SCORE_URLS,
    BadBody,
    as_object,
)
from bulkrun.job.prompts.body_params import BodyParams
from bulkrun.job.prompts.body_text import one_list_of_ids, one_text
from bulkrun.job.prompts.conversations import Ask, RowToAsk, shown
from bulkrun.job.prompts.openai_chat import read_chat
from bulkrun.job.prompts.openai_embeddings import read_embedding
from bulkrun.job.prompts.openai_responses import read_response
from bulkrun.job.prompts.score_lines import read_rerank, read_score
from bulkrun.job.prompts.token_lists import ask_of_ids
from bulkrun.request import RowError

_Read = Callable[[dict[str, Any]], Ask | RowError]  # of a body
_TASKS = {
    **dict.fromkeys((CHAT_URL, RESPONSES_URL, COMPLETIONS_URL), "task: generate"),
    EMBEDDINGS_URL: "task: embed",
    **dict.fromkeys(
        (*SCORE_URLS, *RERANK_URLS),
        "task: classify and prompt: {score_lines: true}, or with a model of vectors task: embed and that",
    ),
}


def batch_maker(spec: JobSpec, columns: Sequence[str], id_column: str) -> tuple[RowToAsk, list[str]]:
    """The function from a batch line to what it asks, and the columns that it reads; `id_column` names the line."""
    reads = [name for name in (id_column, "method", "url", "body") if name in columns]
    served = _endpoints(spec)

    def ask(row: Mapping[str, Any]) -> Ask | RowError:
        try:
            if row.get(id_column) is None:
                raise BadBody(f"{id_column}: missing; without it nobody could tell whose answer this is")
            read = _endpoint(row.get("method"), row["url"], served)
            body = read_body(row["body"])
            asked, cut = read(body), cut_of(body, generates=spec.generates)
            return asked if isinstance(asked, RowError) else asked._replace(model=body.get("model"), cut=cut)
        except BadBody as problem:
            return RowError("bad_input", str(problem))

    return ask, reads


def _endpoints(spec: JobSpec) -> dict[str, _Read]:
    """What the job serves: path -> how a body is read."""
    if spec.task == "classify" or spec.prompt.score_lines:
        made = spec.classification if spec.task == "classify" else None
        score, rerank = (partial(read, made=made) for read in (read_score, read_rerank))
        return {**dict.fromkeys(SCORE_URLS, score), **dict.fromkeys(RERANK_URLS, rerank)}
    if spec.task == "embed":
        return {EMBEDDINGS_URL: partial(read_embedding, embedding=spec.embedding, lists=spec.prompt.text_lists)}
    params, calls = BodyParams(spec.sampling), spec.sampling.tool_calls
    readers = {CHAT_URL: read_chat, RESPONSES_URL: read_response, COMPLETIONS_URL: _completion}
    return {url: partial(read, params=params, calls=calls) for url, read in readers.items()}


def _endpoint(method: Any, url: Any, served: Mapping[str, _Read]) -> _Read:
    if method not in (None, "POST"):
        raise BadBody(f"method: {shown(method)} is not served; only POST is")
    path = url.rstrip("/") if isinstance(url, str) else ""
    if path in served:
        return served[path]
    fix = f" (such lines are for a job with {_TASKS[path]})" if path in _TASKS else ""
    *others, last = [name for name in served if name.startswith("/v1/")]
    usual = f"{', '.join(others)} and {last} are" if others else f"{last} is"
    raise BadBody(f"url: {shown(url)} is not served; {usual}{fix}")


def read_body(body: Any) -> dict[str, Any]:
    """The body as an object, without its nulls; it comes as JSON text, or as a struct from a Parquet file.

    Nulls deeper in a text are meant; those in a struct are fields that other rows have. Raises BadBody.
    """
    given = as_object("body", without_nulls(body), "an object")
    return {key: value for key, value in given.items() if value is not None}


def _completion(body: dict[str, Any], params: BodyParams, calls: ToolCallsSpec | None) -> Ask | RowError:
    """Without calls, for which its answers have no place: they are text. Token ids are the job's own model's."""
    if "prompt" not in body:
        raise BadBody(f"body.prompt: missing; {COMPLETIONS_URL} needs a text, or token ids")
    token_ids = one_list_of_ids("prompt", body["prompt"])
    if token_ids is None:
        ask: Ask | RowError = Ask([{"role": "user", "content": one_text("prompt", body["prompt"])}], raw=True)
    else:
        ask = ask_of_ids("body.prompt", token_ids)
    no_calls = {} if calls is None else {"tool_calls": NONE}
    sampling = {**params.of_completion(body), **no_calls}
    return ask if isinstance(ask, RowError) else ask._replace(sampling=sampling)
