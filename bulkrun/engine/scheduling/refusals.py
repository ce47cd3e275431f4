"""Which requests can be served at all, and what the rows of those that cannot are told. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bulkrun.request import Completion, Request, RowError, SamplingParams

_EMPTY_PROMPT = RowError("empty_prompt", "the prompt has no tokens; give at least one")


def refusal(
    request: Request,
    *,
    max_model_len: int,
    vocab_size: int,
    has_stop_matcher: bool,
    has_constraints: bool,
    knows_sampling: bool = False,
) -> RowError | None:
    """Why no output can be generated for the request, or None: codes `empty_prompt`, `too_long`, `bad_input`.

    `knows_sampling`: another request with the same sampling was not refused.
    """
    prompt, sampling = request.prompt_token_ids, request.sampling
    if len(prompt) == 0:
        return _EMPTY_PROMPT
    if len(prompt) >= max_model_len:
        return RowError(
            "too_long",
            f"the prompt has {len(prompt)} tokens and one sequence may have {max_model_len} with its output, by the "
            "model, engine.max_model_len or the memory for its KV cache; shorten it to "
            f"{max_model_len - 1} tokens, where the model takes more raise engine.max_model_len or "
            "engine.kv_cache_memory_bytes, or have a job cut it: run.on_too_long with "
            f"engine.max_model_len: {max_model_len}",
        )
    given = _token_ids(request) | ({} if knows_sampling else _token_ids_of(sampling))
    if (unknown := _unknown_token(given, vocab_size)) is not None:
        return unknown
    if not -(2**63) <= request.seed < 2**63:
        return RowError("bad_input", f"the seed {request.seed} has more than 64 bits; give one from -2^63 to 2^63 - 1")
    if sampling.stop and not has_stop_matcher:
        return RowError("bad_input", "sampling.stop needs a tokenizer; this engine was made without stop strings")
    if needs_constraint(request) and not has_constraints:
        return RowError(
            "bad_input",
            "sampling.structured_outputs, thinking, bad_words and allowed_token_ids need a tokenizer; this engine was "
            "made without token constraints",
        )
    return None


def text_refusal(request: Request, *, max_model_len: int, vocab_size: int) -> RowError | None:
    """Why its text cannot be embedded or classified, or None: the same codes."""
    num_tokens = len(request.prompt_token_ids)
    if num_tokens == 0:
        return _EMPTY_PROMPT
    if num_tokens > max_model_len:
        return RowError(
            "too_long",
            f"the prompt has {num_tokens} tokens and a text may have {max_model_len}, by the model or "
            "engine.max_model_len; shorten it, have it cut (run.on_too_long, from Python on_too_long), or raise "
            "engine.max_model_len where the model takes more",
        )
    return _unknown_token(_token_ids(request), vocab_size)


def needs_constraint(request: Request) -> bool:
    """Whether anything besides the model decides which tokens may come next."""
    sampling = request.sampling
    is_bound = sampling.structured_outputs is not None or sampling.thinking is not None
    return is_bound or bool(sampling.bad_words) or sampling.allowed_token_ids is not None


def without_output(request: Request, error: RowError) -> Completion:
    """The completion of a request that ends with an error and nothing else."""
    return Completion(
        request_id=request.request_id,
        token_ids=(),
        finish_reason="error",
        num_prompt_tokens=len(request.prompt_token_ids),
        error=error,
    )


def _token_ids(request: Request) -> dict[str, Sequence[int]]:
    return {"the prompt": request.prompt_token_ids, "output_token_ids": request.output_token_ids}


def _token_ids_of(sampling: SamplingParams) -> dict[str, Sequence[int]]:
    """Of these there may be as many as the model has tokens, for each of a million rows."""
    return {
        "sampling.stop_token_ids": sampling.stop_token_ids,
        "sampling.logit_bias": [token_id for token_id, _ in sampling.logit_bias],
        "sampling.allowed_token_ids": sampling.allowed_token_ids or (),
    }


def _unknown_token(given: Mapping[str, Sequence[int]], vocab_size: int) -> RowError | None:
    """The first token id that the model does not have, by where the request has it."""
    for name, token_ids in given.items():
        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            return RowError("bad_input", f"{name} has token id {wrong}; the model's ids go from 0 to {vocab_size - 1}")
    return None
