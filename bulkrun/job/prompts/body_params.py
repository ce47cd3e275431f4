"""The parameters in the body of an OpenAI request, turned into a row's own sampling values.

Names and meanings are OpenAI's and, for what OpenAI has not (`top_k`, `min_p`, `structured_outputs`...), vLLM's.
Null counts as absent. `body_keys` knows which keys there are. Knows no messages and no columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.data.types.json_types import is_unicode
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.template_kwargs import check_template_kwargs, is_json
from bulkrun.job.jobfile.thinking import BUDGET
from bulkrun.job.prompts.body_keys import (
    ADD_PROMPT,
    CONTINUE,
    FLAGS,
    NUMBERS,
    OVER_PROMPT,
    RESPONSE_TOO,
    TEXT_FORMAT,
    TOKEN_IDS,
    WHOLE_NUMBERS,
    BadBody,
    check_chat_keys,
    check_completion_keys,
    check_response_keys,
    flag_of,
    whole_number,
)
from bulkrun.job.prompts.body_structure import structure_of
from bulkrun.job.prompts.conversations import shown
from bulkrun.job.prompts.response_sections import effort_of, text_format, wants_logprobs

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_MAX_WHOLE = 2**31 - 1  # what the engine's tensors hold; a seed is hashed


class BodyParams:
    """Reads the sampling values of bodies, for one job's `sampling`. Its methods raise BadBody."""

    def __init__(self, sampling: SamplingSpec) -> None:
        self._n = sampling.n
        self._thinks = sampling.thinking is not None
        self._columns = {key for key in ("logprobs", OVER_PROMPT) if getattr(sampling, key) is not None}
        self._has_token_ids = sampling.return_token_ids
        # what a line need not say: one that says it stays the row it is without
        self._flags = {key: getattr(sampling, key) for key in FLAGS if key not in sampling.per_row}

    def of_chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling values of a /v1/chat/completions body."""
        check_chat_keys(body)
        return self._common(body) | self._logprobs("logprobs", _chat_logprobs(body))

    def of_completion(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling values of a /v1/completions body."""
        check_completion_keys(body)
        count = body.get("logprobs", False)
        return self._common(body) | self._logprobs("logprobs", None if count is False else _whole("logprobs", count))

    def of_response(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling values of a /v1/responses body: those of a chat that asks for the same."""
        check_response_keys(body)
        given = {key: body[key] for key in RESPONSE_TOO if key in body}
        if "max_output_tokens" in body:
            given["max_tokens"] = _whole("max_output_tokens", body["max_output_tokens"])
        if (wanted := text_format(body)) is not None:
            given[TEXT_FORMAT] = wanted
        return self._common(given) | self._logprobs("logprobs", _response_logprobs(body), asked="include")

    def _common(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the endpoints share; sorted, so that the same values always give the same text."""
        if "n" in body and (type(body["n"]) is not int or body["n"] != self._n):
            raise BadBody(
                f"body.n: {shown(body['n'])}, but the job makes {self._n} per line (sampling.n, for all lines)"
            )
        if flag_of(body, TOKEN_IDS) and not self._has_token_ids:
            raise BadBody(f"body.{TOKEN_IDS}: set sampling.{TOKEN_IDS}: true in the job file, for all lines")
        values: dict[str, Any] = {key: _number(key, body[key]) for key in NUMBERS if key in body}
        values |= {key: _whole(key, body[key]) for key in WHOLE_NUMBERS if key in body}
        if "max_completion_tokens" in values:
            values["max_tokens"] = values.pop("max_completion_tokens")
        values |= _texts(body) | _token_ids(body) | _biases(body) | self._thoughts(body)
        values |= self._logprobs(OVER_PROMPT, _whole(OVER_PROMPT, body[OVER_PROMPT]) if OVER_PROMPT in body else None)
        values |= {key: flag for key, flag in _flags(body).items() if flag is not self._flags.get(key)}
        if (structure := structure_of(body)) is not None:
            values["structured_outputs"] = structure
        return dict(sorted(values.items()))

    def _thoughts(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """How many tokens the line's thoughts may have: as vLLM has it, -1 for as many as there is room for."""
        if BUDGET not in body:
            return {}
        budget = _whole(BUDGET, body[BUDGET])
        if budget < -1:
            raise BadBody(f"body.{BUDGET}: {budget} is out of range: at least 0, or -1 for no limit")
        if not self._thinks:
            raise BadBody(f"body.{BUDGET}: {budget}: nothing tells thoughts; set sampling.thinking in the job file")
        return {BUDGET: None if budget == -1 else budget}

    def _logprobs(self, key: str, count: int | None, asked: str | None = None) -> dict[str, Any]:
        """`asked`: what the body calls it, where that is another word."""
        if count is None:
            return {}
        if key not in self._columns:
            raise BadBody(
                f"body.{asked or key}: log-probabilities are asked for, but the job has no column for them; set "
                f"sampling.{key}: {count} in the job file"
            )
        return {key: count}


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise BadBody(f"body.{key}: {shown(value)} is not a number")
    return float(value)


def _whole(key: str, value: Any) -> int:
    whole = whole_number(key, value)
    if key != "seed" and abs(whole) > _MAX_WHOLE:
        raise BadBody(f"body.{key}: {shown(value)} is out of range")
    return whole


def _texts(body: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key in ("stop", "bad_words"):
        given = body.get(key, [])
        texts = [given] if isinstance(given, str) and key == "stop" else given
        if not isinstance(texts, list) or not all(isinstance(one, str) and one and is_unicode(one) for one in texts):
            what = "a text or a list of texts" if key == "stop" else "a list of texts"
            raise BadBody(f"body.{key}: {shown(given)} is not {what}, none of them empty")
        values[key] = texts
    return {key: texts for key, texts in values.items() if texts}


def _token_ids(body: Mapping[str, Any]) -> dict[str, Any]:
    given = {key: body[key] for key in ("stop_token_ids", "allowed_token_ids") if key in body}
    for key, ids in given.items():
        if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
            raise BadBody(f"body.{key}: {shown(ids)} is not a list of token ids")
    return {key: ids for key, ids in given.items() if ids or key == "allowed_token_ids"}  # an empty one is refused


def _flags(body: Mapping[str, Any]) -> dict[str, bool]:
    return {key: flag for key in FLAGS if (flag := flag_of(body, key)) is not None}


def _biases(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("logit_bias", {})
    if not isinstance(given, dict) or not all(key.isdecimal() for key in given):
        raise BadBody(f"body.logit_bias: {shown(given)} is not an object of token ids and numbers")
    biases = {key: _number("logit_bias", value) for key, value in sorted(given.items())}
    return {"logit_bias": biases} if biases else {}


def _chat_logprobs(body: Mapping[str, Any]) -> int | None:
    """How many alternatives a chat asks for; None: no log-probabilities at all."""
    wanted, top = flag_of(body, "logprobs"), _whole("top_logprobs", body.get("top_logprobs", 0))
    if top and not wanted:
        raise BadBody("body.top_logprobs: needs logprobs: true as well")
    return top if wanted else None


def _response_logprobs(body: Mapping[str, Any]) -> int | None:
    wanted, top = wants_logprobs(body), _whole("top_logprobs", body.get("top_logprobs", 0))
    if top and not wanted:
        raise BadBody("body.top_logprobs: needs include: [message.output_text.logprobs] as well")
    return top if wanted else None


def template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The values for the chat template that a chat brings; they win over the job's. Raises BadBody."""
    effort = _effort("reasoning_effort", body.get("reasoning_effort"))
    asks = {} if flag_of(body, ADD_PROMPT) in (None, True) else {ADD_PROMPT: False}
    return {**effort, **_documents(body), **_given_kwargs(body), **asks}


def continues(body: Mapping[str, Any]) -> bool | None:
    """Whether the model goes on with the last message of a chat; None: it does not say. Raises BadBody."""
    goes_on, begins = flag_of(body, CONTINUE), flag_of(body, ADD_PROMPT)
    if goes_on and begins:
        raise BadBody(f"body.{CONTINUE}: true together with {ADD_PROMPT}: true, which begins another message")
    return False if begins else goes_on


def response_template_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a /v1/responses body."""
    return {**_effort("reasoning.effort", effort_of(body)), **_given_kwargs(body)}


def _documents(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("documents", [])
    if not isinstance(given, list) or not all(isinstance(one, dict) and is_json(one) for one in given):
        raise BadBody(f"body.documents: {shown(given)} is not a list of objects")
    return {"documents": given} if given else {}


def _given_kwargs(body: Mapping[str, Any]) -> dict[str, Any]:
    given = body.get("chat_template_kwargs", {})
    try:
        check_template_kwargs(given)
    except ValueError as problem:
        raise BadBody(f"body.chat_template_kwargs: {problem}") from None
    return dict(given)


def _effort(key: str, effort: Any) -> dict[str, Any]:
    """What an effort is to chat templates, as vLLM has it: some read the word, others whether to think."""
    if effort is None:
        return {}
    if effort not in _EFFORTS:
        raise BadBody(f"body.{key}: {shown(effort)} is not one of {', '.join(_EFFORTS)}")
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"}
