"""When a sequence ends and what its completion says; which requests can be served at all. Pure Python."""

from __future__ import annotations

from typing import NamedTuple

from bulkrun.engine.sequence import Sequence
from bulkrun.request import Completion, FinishReason, Request, RowError


class Ending(NamedTuple):
    """Why a sequence ended; `drop_last`: the token that ended it is not part of the answer."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    drop_last: bool = False


def refusal(request: Request, *, max_model_len: int, vocab_size: int, has_stop_matcher: bool) -> RowError | None:
    """Why the request cannot be served, or None: codes `empty_prompt`, `too_long`, `bad_input`."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if len(prompt) == 0:
        return RowError("empty_prompt", "the prompt has no tokens; give at least one")
    if len(prompt) >= max_model_len:
        return RowError(
            "too_long",
            f"the prompt has {len(prompt)} tokens and one sequence may have {max_model_len} with its output; "
            f"shorten it to {max_model_len - 1} tokens, raise engine.max_model_len or set run.on_too_long",
        )
    for name, token_ids in (
        ("the prompt", prompt),
        ("output_token_ids", request.output_token_ids),
        ("sampling.stop_token_ids", sampling.stop_token_ids),
    ):
        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            return RowError("bad_input", f"{name} has token id {wrong}; the model's ids go from 0 to {vocab_size - 1}")
    if sampling.stop and not has_stop_matcher:
        return RowError("bad_input", "sampling.stop needs a tokenizer; this engine was made without stop strings")
    return None


def ending_of(seq: Sequence) -> Ending | None:
    """Whether the sequence ends with its last token, which must be an output token the matcher has not seen."""
    sampling, token_id = seq.request.sampling, seq.token_ids[-1]
    matched = seq.stop_matcher.append(token_id) if seq.stop_matcher is not None else None
    if seq.num_output_tokens > sampling.min_tokens:
        if token_id in seq.stop_token_ids:
            is_eos = token_id in seq.eos_token_ids
            return Ending("stop", None if is_eos else token_id, drop_last=True)
        if matched is not None:
            return Ending("stop", matched)
    if seq.num_tokens >= seq.max_num_tokens:
        return Ending("length")
    return None


def completion_of(seq: Sequence, ending: Ending) -> Completion:
    """What the caller gets of an ended sequence."""
    end = -1 if ending.drop_last else None
    return Completion(
        request_id=seq.request.request_id,
        token_ids=seq.output_token_ids[:end],
        finish_reason=ending.finish_reason,
        stop_reason=ending.stop_reason,
        num_prompt_tokens=seq.num_prompt_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_output_tokens=seq.num_output_tokens,
        logprobs=None if seq.logprobs is None else tuple(seq.logprobs[:end]),
    )


def error_completion(request: Request, error: RowError, output_token_ids: tuple[int, ...] = ()) -> Completion:
    """What the caller gets of a request that failed; tokens generated before the failure are kept."""
    return Completion(
        request_id=request.request_id,
        token_ids=output_token_ids,
        finish_reason="error",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_output_tokens=len(output_token_ids),
        error=error,
    )
