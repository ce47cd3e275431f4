"""The parameters in the body of an OpenAI request, turned into a row's own sampling values.

Names and meanings are OpenAI's and, for what OpenAI has not (`top_k`, `min_p`, `structured_outputs`...), vLLM's.
Null counts as absent. Knows no messages and no columns.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from typing import Any

from bulkrun.data.json_types import is_unicode
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.prompts.conversations import shown

# For OpenAI's service, or hints to OpenAI's own models: no answer of another model depends on them.
_IGNORED = (
    *("model", "user", "metadata", "store", "service_tier", "safety_identifier", "moderation", "priority"),
    *("stream_options", "tool_choice", "parallel_tool_calls", "reasoning_effort", "verbosity", "prediction"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "request_id"),
)
# Would change the answer, and nothing here does it: name -> the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "tools": ([],),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "suffix": ("",),
    "echo": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "chat_template_kwargs": ({},),
    "chat_template": (),
}
_REASONS = {
    "stream": "a batch has no streams: leave it out",
    "tools": "tool calls are not supported",
    "functions": "tool calls are not supported",
    "function_call": "tool calls are not supported",
    "modalities": "only text is generated",
    "audio": "only text is generated",
    "best_of": "set sampling.best_of in the job file",
    "guided_regex": "per line only JSON schemas are; set sampling.structured_outputs in the job file",
    "guided_choice": "per line only JSON schemas are; set sampling.structured_outputs in the job file",
    "guided_grammar": "per line only JSON schemas are; set sampling.structured_outputs in the job file",
    "chat_template": "set prompt.chat_template in the job file",
}
_MAX_WHOLE = 2**31 - 1  # what the engine's tensors hold; a seed is hashed
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_WHOLE_NUMBERS = ("max_tokens", "max_completion_tokens", "min_tokens", "top_k", "seed")
_HANDLED = ("n", "stop", "stop_token_ids", "logprobs", "response_format", "structured_outputs", "guided_json")
_CHAT_ONLY = ("messages", "top_logprobs")
_COMPLETION_ONLY = ("prompt",)


class BadBody(ValueError):
    """Why a line cannot be run: ``body.key: value is not supported; what is``."""


class BodyParams:
    """Reads the sampling values of bodies, for one job's `sampling`. Its methods raise BadBody."""

    def __init__(self, sampling: SamplingSpec) -> None:
        self._n = sampling.n
        self._has_logprobs = sampling.logprobs is not None

    def of_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling values of a /v1/chat/completions body."""
        _refuse_unsupported(body, _CHAT_ONLY)
        return self._common(body) | self._logprobs(_chat_logprobs(body))

    def of_completion(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling values of a /v1/completions body."""
        _refuse_unsupported(body, _COMPLETION_ONLY)
        count = body.get("logprobs")
        return self._common(body) | self._logprobs(None if count is None else _whole("logprobs", count))

    def _common(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What both endpoints share; sorted, so that the same values always give the same text."""
        if "n" in body and (type(body["n"]) is not int or body["n"] != self._n):
            raise BadBody(
                f"body.n: {shown(body['n'])}, but the job makes {self._n} per line (sampling.n, for all lines)"
            )
        values: dict[str, Any] = {key: _number(key, body[key]) for key in _NUMBERS if key in body}
        values |= {key: _whole(key, body[key]) for key in _WHOLE_NUMBERS if key in body}
        if "max_completion_tokens" in values:
            values["max_tokens"] = values.pop("max_completion_tokens")
        values |= _stops(body)
        if (schema := _schema(body)) is not None:
            values["structured_outputs"] = schema
        return dict(sorted(values.items()))

    def _logprobs(self, count: int | None) -> dict[str, Any]:
        if count is None:
            return {}
        if not self._has_logprobs:
            raise BadBody(
                f"body.logprobs: asked for, but the job has no column for them; set sampling.logprobs: {count} "
                "in the job file"
            )
        return {"logprobs": count}


def _refuse_unsupported(body: Mapping[str, Any], own: tuple[str, ...]) -> None:
    known = {*own, *_HANDLED, *_NUMBERS, *_WHOLE_NUMBERS, *_REFUSED}
    for key, value in body.items():
        if key in _REFUSED and value not in _REFUSED[key]:
            raise BadBody(f"body.{key}: {shown(value)} is not supported; {_REASONS.get(key, 'leave it out')}")
        if key not in known and key not in _IGNORED:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "leave it out"
            raise BadBody(f"body.{shown(key)[1:-1]}: {shown(value)}: this parameter is not supported; {hint}")


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise BadBody(f"body.{key}: {shown(value)} is not a number")
    return float(value)


def _whole(key: str, value: Any) -> int:
    whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    if not whole:
        raise BadBody(f"body.{key}: {shown(value)} is not a whole number")
    if key != "seed" and abs(value) > _MAX_WHOLE:
        raise BadBody(f"body.{key}: {shown(value)} is out of range")
    return int(value)


def _stops(body: Mapping[str, Any]) -> dict[str, Any]:
    stop, ids = body.get("stop", []), body.get("stop_token_ids", [])
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, list) or not all(isinstance(text, str) and text and is_unicode(text) for text in texts):
        raise BadBody(f"body.stop: {shown(stop)} is not a text or a list of texts, none of them empty")
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise BadBody(f"body.stop_token_ids: {shown(ids)} is not a list of token ids")
    return {key: value for key, value in (("stop", texts), ("stop_token_ids", ids)) if value}


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """How many alternatives a chat asks for; None: no log-probabilities at all."""
    wanted, top = body.get("logprobs", False), body.get("top_logprobs", 0)
    if not isinstance(wanted, bool):
        raise BadBody(f"body.logprobs: {shown(wanted)} is not true or false")
    if top and not wanted:
        raise BadBody("body.top_logprobs: needs logprobs: true beside it")
    return _whole("top_logprobs", top) if wanted else None


def _schema(body: Mapping[str, Any]) -> str | None:
    """The JSON schema of the answer as text; None where any text will do."""
    readers: dict[str, Callable[[Any], dict[str, Any] | None]] = {
        "response_format": _of_response_format,
        "structured_outputs": _of_structured_outputs,
        "guided_json": lambda value: _schema_object("guided_json", value),
    }
    given = [key for key in readers if key in body]
    if len(given) > 1:
        raise BadBody(f"body.{given[1]}: beside {given[0]}; write one of them")
    schema = readers[given[0]](body[given[0]]) if given else None
    return None if schema is None else json.dumps(schema)


def _of_response_format(value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        inner = value.get("json_schema")
        # A schema is optional there: any JSON object will do then.
        schema = inner.get("schema", {"type": "object"}) if isinstance(inner, dict) else None
        return _schema_object("response_format.json_schema.schema", schema)
    raise BadBody(f"body.response_format: {shown(value)} is not supported; types text, json_object, json_schema are")


def _of_structured_outputs(value: Any) -> dict[str, Any]:
    given = {key: inner for key, inner in value.items() if inner is not None} if isinstance(value, dict) else {}
    if given.keys() == {"json_object"} and given["json_object"] is True:
        return {"type": "object"}
    if given.keys() != {"json"}:
        raise BadBody(
            f"body.structured_outputs: {shown(value)}; per line only {{json: schema}} is supported: set "
            "sampling.structured_outputs in the job file for a regex, choice or grammar"
        )
    return _schema_object("structured_outputs.json", given["json"])


def _schema_object(key: str, value: Any) -> dict[str, Any]:
    """A schema given as an object, or as its JSON text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise BadBody(f"body.{key}: {shown(value)} is not JSON") from None
    if not isinstance(value, dict):
        raise BadBody(f"body.{key}: {shown(value)} is not a JSON schema")
    return value
