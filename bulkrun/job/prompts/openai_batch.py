"""OpenAI batch lines: `custom_id`, `method`, `url`, `body`, run as they are by the job's own model.

Served are POST /v1/chat/completions and /v1/completions. A parameter that changes the answer is honoured or the row
is a `bad_input` that names it; one that only concerns OpenAI's service (accounting, caching, hints to its own models)
is ignored, `model` among them. Knows the format; `body_params` knows the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bulkrun.data.inputs.python_rows import without_nulls
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.prompts.body_keys import BadBody, as_object
from bulkrun.job.prompts.body_params import BodyParams, template_kwargs
from bulkrun.job.prompts.conversations import Ask, BadMessages, Conversation, RowToAsk, read_messages, shown
from bulkrun.request import RowError

CHAT_URL = "/v1/chat/completions"
COMPLETIONS_URL = "/v1/completions"


def batch_maker(sampling: SamplingSpec, columns: Sequence[str], id_column: str) -> tuple[RowToAsk, list[str]]:
    """The function from a batch line to what it asks, and the columns that it reads; `id_column` names the line."""
    reads = [name for name in (id_column, "method", "url", "body") if name in columns]
    params = BodyParams(sampling)

    def ask(row: Mapping[str, Any]) -> Ask | RowError:
        try:
            if row.get(id_column) is None:
                raise BadBody(f"{id_column}: missing; without it nobody could tell whose answer this is")
            make = _endpoint(row.get("method"), row["url"])
            body = _read_body(row["body"])
            return make(body, params)
        except (BadBody, BadMessages) as problem:
            return RowError("bad_input", str(problem))

    return ask, reads


def _endpoint(method: Any, url: Any) -> Callable[[dict[str, Any], BodyParams], Ask]:
    if method not in (None, "POST"):
        raise BadBody(f"method: {shown(method)} is not served; only POST is")
    path = url.rstrip("/") if isinstance(url, str) else url
    if path == CHAT_URL:
        return _chat
    if path == COMPLETIONS_URL:
        return _completion
    raise BadBody(f"url: {shown(url)} is not served; {CHAT_URL} and {COMPLETIONS_URL} are")


def _read_body(body: Any) -> dict[str, Any]:
    """The body as an object, without its nulls; it comes as JSON text, or as a struct from a Parquet file.

    Nulls deeper in a text are meant; those in a struct are fields that other rows have.
    """
    given = as_object("body", without_nulls(body), "an object")
    return {key: value for key, value in given.items() if value is not None}


def _chat(body: dict[str, Any], params: BodyParams) -> Ask:
    if "messages" not in body:
        raise BadBody(f"body.messages: missing; {CHAT_URL} needs a list of messages")
    try:
        messages = read_messages(body["messages"])
    except BadMessages as problem:
        raise BadBody(f"body.messages{problem}") from None
    sampling = params.of_chat(body)
    return Ask(_with_known_roles(messages), sampling=sampling, template_kwargs=template_kwargs(body))


def _with_known_roles(messages: Conversation) -> Conversation:
    """`developer` is OpenAI's newer word for `system`, which chat templates know."""
    return [{**m, "role": "system"} if m["role"] == "developer" else m for m in messages]


def _completion(body: dict[str, Any], params: BodyParams) -> Ask:
    if "prompt" not in body:
        raise BadBody(f"body.prompt: missing; {COMPLETIONS_URL} needs a text")
    prompt = body["prompt"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not isinstance(prompt, str):
        raise BadBody(f"body.prompt: {_what_prompt(prompt)}")
    return Ask([{"role": "user", "content": prompt}], raw=True, sampling=params.of_completion(body))


def _what_prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and all(isinstance(each, str) for each in prompt):
        return f"{len(prompt)} prompts in one line; write a line for each"
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return "token ids are not supported, as they belong to another model's tokenizer; send text"
    return f"{shown(prompt)} is not text"
