"""OpenAI batch lines: `custom_id`, `method`, `url`, `body`, run as they are by the job's own model.

Served are POST /v1/chat/completions and /v1/completions, by a job that embeds /v1/embeddings, by one of pairs vLLM's
/v1/score and /v1/rerank. A parameter that changes the answer is honoured or the row is a `bad_input` that names it; one
that only concerns OpenAI's service (accounting, caching, hints to its own models) is ignored. So is `model`, unless the
job has adapters for it to name. Knows the format; `body_params`, `body_tools`, `openai_embeddings` and `score_lines`
know the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.tool_calls import ToolCallsSpec
from bulkrun.job.jobfile.tools import NONE
from bulkrun.job.prompts.body_keys import (
    CHAT_URL,
    COMPLETIONS_URL,
    EMBEDDINGS_URL,
    RERANK_URLS,
    SCORE_URLS,
    BadBody,
    as_object,
)
from bulkrun.job.prompts.body_params import BodyParams, template_kwargs
from bulkrun.job.prompts.body_text import one_text
from bulkrun.job.prompts.body_tools import offer_of
from bulkrun.job.prompts.conversations import Ask, BadMessages, Conversation, RowToAsk, read_messages, shown
from bulkrun.job.prompts.openai_embeddings import read_embedding
from bulkrun.job.prompts.score_lines import read_rerank, read_score
from bulkrun.request import RowError

_Read = Callable[[dict[str, Any]], Ask | RowError]  # of a body
_TASKS = {
    **dict.fromkeys((CHAT_URL, COMPLETIONS_URL), "task: generate"),
    EMBEDDINGS_URL: "task: embed",
    **dict.fromkeys((*SCORE_URLS, *RERANK_URLS), "task: classify and prompt: {score_lines: true}"),
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
            asked = read(body)
            return asked if isinstance(asked, RowError) else asked._replace(model=body.get("model"))
        except (BadBody, BadMessages) as problem:
            return RowError("bad_input", str(problem))

    return ask, reads


def _endpoints(spec: JobSpec) -> dict[str, _Read]:
    """What the job serves: path -> how a body is read."""
    if spec.task == "embed":
        return {EMBEDDINGS_URL: partial(read_embedding, embedding=spec.embedding, lists=spec.prompt.text_lists)}
    if spec.task == "classify":
        score, rerank = (partial(read, made=spec.classification) for read in (read_score, read_rerank))
        return {**dict.fromkeys(SCORE_URLS, score), **dict.fromkeys(RERANK_URLS, rerank)}
    params, calls = BodyParams(spec.sampling), spec.sampling.tool_calls
    chat, completion = (partial(read, params=params, calls=calls) for read in (_chat, _completion))
    return {CHAT_URL: chat, COMPLETIONS_URL: completion}


def _endpoint(method: Any, url: Any, served: Mapping[str, _Read]) -> _Read:
    if method not in (None, "POST"):
        raise BadBody(f"method: {shown(method)} is not served; only POST is")
    path = url.rstrip("/") if isinstance(url, str) else ""
    if path in served:
        return served[path]
    fix = f" (such lines are for a job with {_TASKS[path]})" if path in _TASKS else ""
    usual = [name for name in served if name.startswith("/v1/")]
    raise BadBody(f"url: {shown(url)} is not served; {' and '.join(usual)} {'is' if len(usual) == 1 else 'are'}{fix}")


def read_body(body: Any) -> dict[str, Any]:
    """The body as an object, without its nulls; it comes as JSON text, or as a struct from a Parquet file.

    Nulls deeper in a text are meant; those in a struct are fields that other rows have. Raises BadBody.
    """
    given = as_object("body", without_nulls(body), "an object")
    return {key: value for key, value in given.items() if value is not None}


def _chat(body: dict[str, Any], params: BodyParams, calls: ToolCallsSpec | None) -> Ask:
    if "messages" not in body:
        raise BadBody(f"body.messages: missing; {CHAT_URL} needs a list of messages")
    try:
        messages = read_messages(body["messages"])
    except BadMessages as problem:
        raise BadBody(f"body.messages{problem}") from None
    sampling, offer = params.of_chat(body), offer_of(body, calls)
    if offer.tools and "structured_outputs" in sampling and calls is not None and calls.are_read:
        raise BadBody("body.tools: given together with what says how the answer looks, which has no room for calls")
    kwargs = {**template_kwargs(body), **offer.template_kwargs}
    return Ask(_with_known_roles(messages), sampling={**sampling, **offer.sampling}, template_kwargs=kwargs)


def _with_known_roles(messages: Conversation) -> Conversation:
    """`developer` is OpenAI's newer word for `system`, which chat templates know."""
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _completion(body: dict[str, Any], params: BodyParams, calls: ToolCallsSpec | None) -> Ask:
    """Without calls, for which its answers have no place: they are text."""
    if "prompt" not in body:
        raise BadBody(f"body.prompt: missing; {COMPLETIONS_URL} needs a text")
    prompt = one_text("prompt", body["prompt"])
    no_calls = {} if calls is None else {"tool_calls": NONE}
    sampling = {**params.of_completion(body), **no_calls}
    return Ask([{"role": "user", "content": prompt}], raw=True, sampling=sampling)
