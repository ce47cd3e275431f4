"""Results in OpenAI's batch format: a line for the output file, a line for the error file, per request.

A request whose every sample failed is in the error file alone; one with some good samples is in both, each with its
own choices. Ids are made from run and row, so that two exports of one run are equal. Knows the format; knows no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Any, NamedTuple

from bulkrun.job.plan.result_columns import PROMPT_TOKEN_IDS, TOKEN_IDS
from bulkrun.job.prompts.body_keys import COMPLETIONS_URL, OVER_PROMPT
from bulkrun.job.views.response_bodies import is_response, output_items, response_body, token_bytes
from bulkrun.job.views.score_bodies import is_rerank, rerank_body, score_body
from bulkrun.settings import Task

Row = Mapping[str, Any]
_CLIENT_ERRORS = ("bad_input", "bad_template", "too_long", "empty_prompt", "invalid_schema", "grammar_failed")


class BatchLines(NamedTuple):
    """One request's lines; None where it has none for that file."""

    output: dict[str, Any] | None
    error: dict[str, Any] | None


class LineMaker:
    """Makes the lines of one run. `id_column` names requests (None: the row's number), `created` is in Unix seconds.

    `sampling` is that of the job: it says which of `reasoning`, `tool_calls`, both kinds of log-probabilities and the
    columns of token ids the model made; else the input did. `task` is what it made: texts, vectors, or scores of pairs.
    """

    def __init__(
        self, run_id: str, model: str, created: int, id_column: str | None, sampling: Row, *, task: Task = "generate"
    ) -> None:
        self._run_id, self._model, self._created, self._id_column = run_id, model, created, id_column
        self._make = {"generate": self._generated, "embed": self._vector, "classify": self._scores}[task]
        made_by = {"reasoning": "thinking", **{name: name for name in ("tool_calls", "logprobs", OVER_PROMPT)}}
        made_by |= dict.fromkeys((PROMPT_TOKEN_IDS, TOKEN_IDS), "return_token_ids")
        asked = {key for key, value in sampling.items() if value is not None and value is not False}
        self._foreign = {name for name, key in made_by.items() if key not in asked}
        if (sampling.get("tool_calls") or {}).get("format") == "none":
            self._foreign.add("tool_calls")

    def lines(self, rows: Iterable[Row]) -> Iterator[BatchLines]:
        """The lines of all requests; `rows` are output rows in input order, samples of one request together."""
        for _, samples in groupby(rows, key=lambda row: row["row"]):
            yield self._request(list(samples))

    def _custom_id(self, row: Row) -> str | None:
        if self._id_column is None:
            return str(row["row"])
        value = row[self._id_column]  # null in a line that could not be read
        return None if value is None else str(value)

    def _request(self, samples: Sequence[Row]) -> BatchLines:
        custom_id = self._custom_id(samples[0])
        samples = [{name: row[name] for name in row if name not in self._foreign} for row in samples]
        good = [row for row in samples if row["error_code"] is None]
        failed = [row for row in samples if row["error_code"] is not None]
        digest = blake2b(f"{self._run_id}|{samples[0]['row']}".encode(), digest_size=12).hexdigest()
        head = {"id": f"batch_req_{digest}", "custom_id": custom_id}
        output = {**head, **_success(digest, self._make(digest, good))} if good else None
        return BatchLines(output, {**head, **_failure(digest, failed, len(samples))} if failed else None)

    def _generated(self, digest: str, rows: Sequence[Row]) -> dict[str, Any]:
        return self._response(digest, rows) if is_response(rows[0]) else self._completion(digest, rows)

    def _response(self, digest: str, rows: Sequence[Row]) -> dict[str, Any]:
        head = {"id": f"resp_{digest}", "object": "response", "created_at": self._created, "model": self._model}
        return {**head, **response_body(rows, digest)}

    def _completion(self, digest: str, rows: Sequence[Row]) -> dict[str, Any]:
        raw = _is_raw(rows[0])
        prompt_tokens = rows[0]["prompt_tokens"] or 0
        completion_tokens = sum(row["completion_tokens"] or 0 for row in rows)
        return {
            "id": f"{'cmpl' if raw else 'chatcmpl'}-{digest}",
            "object": "text_completion" if raw else "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [_choice(row, raw) for row in rows],
            **({} if raw else _of_prompt(rows[0])),
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": completion_tokens,
                "total_tokens": prompt_tokens + completion_tokens,
            },
        }

    def _vector(self, _digest: str, rows: Sequence[Row]) -> dict[str, Any]:
        """Always as numbers: what encoding a line asked for is in its body, which the results do not hold."""
        [row] = rows
        vectors = row["embeddings"] if "embeddings" in row else [row["embedding"]]
        return {
            "object": "list",
            "data": [{"object": "embedding", "index": n, "embedding": vector} for n, vector in enumerate(vectors)],
            "model": self._model,
            "usage": {"prompt_tokens": row["prompt_tokens"], "total_tokens": row["prompt_tokens"]},
        }

    def _scores(self, digest: str, rows: Sequence[Row]) -> dict[str, Any]:
        [row] = rows
        if is_rerank(row):
            return {"id": f"rerank-{digest}", "model": self._model, **rerank_body(row)}
        return {"id": f"score-{digest}", "created": self._created, "model": self._model, **score_body(row)}


def _success(digest: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"response": _response(200, digest, body), "error": None}


def _failure(digest: str, rows: Sequence[Row], samples: int) -> dict[str, Any]:
    """The error of the first failed sample, and what those say that have some text all the same."""
    code, message = rows[0]["error_code"], rows[0]["error_message"]
    if len(rows) < samples or len({row["error_message"] for row in rows}) > 1:
        message = f"{len(rows)} of {samples} samples failed; sample {rows[0]['sample']}: {message}"
    body: dict[str, Any] = {"error": {"message": message, "type": code, "param": None, "code": code}}
    if partial := [row for row in rows if row.get("response") is not None]:
        body |= (
            {"output": output_items(partial, digest)}
            if is_response(rows[0])
            else {"choices": [_choice(row, _is_raw(row)) for row in partial]}
        )
    status = 400 if code in _CLIENT_ERRORS else 500
    return {"response": _response(status, digest, body), "error": {"code": code, "message": message}}


def _response(status: int, digest: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": f"req_{digest}", "body": body}


def _is_raw(row: Row) -> bool:
    url = row.get("url")
    return isinstance(url, str) and url.rstrip("/") == COMPLETIONS_URL


def _choice(row: Row, raw: bool) -> dict[str, Any]:
    logprobs = row.get("logprobs")
    choice: dict[str, Any] = {"index": row["sample"], "finish_reason": row["finish_reason"], "logprobs": None}
    choice |= _kept(row, TOKEN_IDS)
    if raw:
        return {
            **choice,
            **_of_prompt(row),
            "text": row["response"],
            "logprobs": None if logprobs is None else _completion_logprobs(logprobs),
        }
    message: dict[str, Any] = {"role": "assistant", "content": row["response"], "refusal": None}
    if row.get("tool_calls"):
        message["tool_calls"] = [_call(call) for call in row["tool_calls"]]
    if row.get("reasoning") is not None:
        message["reasoning"] = message["reasoning_content"] = row["reasoning"]  # vLLM's name, and the one it had before
    return {**choice, "message": message, "logprobs": None if logprobs is None else _chat_logprobs(logprobs)}


def _of_prompt(row: Row) -> dict[str, Any]:
    """What an answer says of its prompt's tokens, where it was asked."""
    entries = row.get(OVER_PROMPT)
    said = {} if entries is None else {OVER_PROMPT: [entry and _by_token_id(entry) for entry in entries]}
    return {**said, **_kept(row, PROMPT_TOKEN_IDS)}


def _by_token_id(entry: Row) -> dict[str, Any]:
    """As vLLM has it: the token that stands there and the likeliest ones. Of the likeliest alone the rank is known."""
    ranked = {str(other["token_id"]): _ranked(other, rank) for rank, other in enumerate(entry["top"] or (), 1)}
    return {str(entry["token_id"]): _ranked(entry, None), **ranked}


def _ranked(entry: Row, rank: int | None) -> dict[str, Any]:
    return {"logprob": entry["logprob"], "rank": rank, "decoded_token": entry["token"]}


def _kept(row: Row, name: str) -> dict[str, Any]:
    return {} if row.get(name) is None else {name: row[name]}


def _call(call: Row) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


def _chat_logprobs(entries: Sequence[Row]) -> dict[str, Any]:
    return {
        "content": [
            {**_token(entry), "top_logprobs": [_token(other) for other in entry["top"] or ()]} for entry in entries
        ],
        "refusal": None,
    }


def _token(entry: Row) -> dict[str, Any]:
    return {"token": entry["token"], "logprob": entry["logprob"], "bytes": token_bytes(entry["token"])}


def _completion_logprobs(entries: Sequence[Row]) -> dict[str, Any]:
    offsets, end = list[int](), 0
    for entry in entries:
        offsets.append(end)
        end += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": [{other["token"]: other["logprob"] for other in entry["top"] or ()} for entry in entries],
        "text_offset": offsets,
    }
