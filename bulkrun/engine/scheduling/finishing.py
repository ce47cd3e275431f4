"""When a sequence ends and what its completion says; which requests can be served at all. Pure Python."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from bulkrun.engine.scheduling.repetition import RepetitionWatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Completion, FinishReason, Progress, Request, RowError, TokenConstraint, TokenLogprob


class Ending(NamedTuple):
    """Why a sequence ended; `drop_last`: the token that ended it is not part of the answer."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    drop_last: bool = False
    error: RowError | None = None
    progress: Progress | None = None


EMPTY_PROMPT = RowError("empty_prompt", "the prompt has no tokens; give at least one")
NOT_NUMBERS = Ending(
    "error",
    error=RowError(
        "engine_error",
        "the model's logits are not finite numbers for this row; try engine.dtype float32, or check the weights",
    ),
)


def refusal(
    request: Request, *, max_model_len: int, vocab_size: int, has_stop_matcher: bool, has_constraints: bool
) -> RowError | None:
    """Why the request cannot be served, or None: codes `empty_prompt`, `too_long`, `bad_input`."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if len(prompt) == 0:
        return EMPTY_PROMPT
    if len(prompt) >= max_model_len:
        return RowError(
            "too_long",
            f"the prompt has {len(prompt)} tokens and one sequence may have {max_model_len} with its output; "
            f"shorten it to {max_model_len - 1} tokens, raise engine.max_model_len or set run.on_too_long",
        )
    if (unknown := unknown_token(request, vocab_size)) is not None:
        return unknown
    if not -(2**63) <= request.seed < 2**63:
        return RowError("bad_input", f"the seed {request.seed} has more than 64 bits; give one from -2^63 to 2^63 - 1")
    if sampling.stop and not has_stop_matcher:
        return RowError("bad_input", "sampling.stop needs a tokenizer; this engine was made without stop strings")
    if needs_constraint(request) and not has_constraints:
        return RowError(
            "bad_input",
            "sampling.structured_outputs and sampling.thinking need a tokenizer; this engine was made without "
            "token constraints",
        )
    return None


def unknown_token(request: Request, vocab_size: int) -> RowError | None:
    """The first token id that the model does not have, wherever the request has one."""
    given = {
        "the prompt": request.prompt_token_ids,
        "output_token_ids": request.output_token_ids,
        "sampling.stop_token_ids": request.sampling.stop_token_ids,
    }
    for name, token_ids in given.items():
        if len(token_ids) and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            wrong = next(t for t in token_ids if not 0 <= t < vocab_size)
            return RowError("bad_input", f"{name} has token id {wrong}; the model's ids go from 0 to {vocab_size - 1}")
    return None


def needs_constraint(request: Request) -> bool:
    """Whether anything besides the model decides which tokens may come next."""
    return request.sampling.structured_outputs is not None or request.sampling.thinking is not None


def append_token(seq: Sequence, token_id: int) -> Ending | None:
    """Give a sequence an output token, which its matcher and guards see here first; whether it ends with that.

    Of several reasons the first of these counts: a grammar that failed, an end the model chose, running in circles,
    the limit.
    """
    seq.token_ids.append(token_id)
    ending = _grammar_failure_of(seq, seq.constraint) if seq.constraint is not None else None
    if ending is None:
        ending = _stop_of(seq)
    if ending is None and seq.repetition is not None:
        ending = _runaway_of(seq, seq.repetition)
    if ending is None and len(seq.token_ids) >= seq.max_num_tokens:
        ending = Ending("length", progress=_progress_of(seq))
    return ending


def append_given_tokens(seq: Sequence) -> Ending | None:
    """Give a new sequence the output tokens that its request brings along; whether it ends with that.

    None, where log-probabilities are wanted: those of the earlier tokens are not there, so it starts over.
    """
    given = () if seq.wants_logprobs else seq.request.output_token_ids
    endings = (append_token(seq, token_id) for token_id in given)
    return next((ending for ending in endings if ending is not None), None)


def append_forced_tokens(seq: Sequence, vocab_size: int, limit: int | None = None) -> Ending | None:
    """Give a sequence the tokens, at most `limit`, that its constraint leaves no choice about; whether it ends so.

    They are those that the sampler would find alone in its masks, each in a step of its own, so that no output changes
    (jump-forward decoding, lmsys.org/blog/2024-02-05-compressed-fsm, without its retokenizing). Where log-probabilities
    are wanted, those steps are needed.
    """
    if seq.constraint is None or seq.wants_logprobs:
        return None
    for token_id in islice(_forced_tokens(seq.constraint), limit):
        if token_id >= vocab_size:  # a tokenizer may have more tokens than its model: no token can follow
            return None
        if seq.row is not None:
            seq.num_unsent_tokens += 1
        if (ending := append_token(seq, token_id)) is not None:
            return ending
    return None


def _forced_tokens(constraint: TokenConstraint) -> Iterator[int]:
    """Each is accepted by whoever asks for the next one."""
    while forced := constraint.forced_tokens():
        yield from forced


def grammar_failure(reason: str, *, drop_last: bool = False) -> Ending:
    """The end of a sequence whose constraint leaves it no next token."""
    return Ending("error", drop_last=drop_last, error=RowError("grammar_failed", reason))


def timeout_of(seq: Sequence) -> Ending:
    """The end of a sequence whose time is over."""
    timeout_s = seq.request.sampling.timeout_s
    message = (
        f"stopped after {seq.num_output_tokens} tokens: its {timeout_s:g} s in the engine were over; "
        f"raise run.row_timeout or lower sampling.max_tokens"
    )
    return Ending("timeout", error=RowError("timeout", message))


def _grammar_failure_of(seq: Sequence, constraint: TokenConstraint) -> Ending | None:
    """A constraint sees the ending token too: one that failed may have allowed nothing else."""
    token_id = seq.token_ids[-1]
    reason = constraint.accept(token_id)
    return None if reason is None else grammar_failure(reason, drop_last=token_id in seq.stop_token_ids)


def _stop_of(seq: Sequence) -> Ending | None:
    token_id = seq.token_ids[-1]
    matched = seq.stop_matcher.append(token_id) if seq.stop_matcher is not None else None
    if matched is None and token_id not in seq.stop_token_ids:
        return None
    is_early = seq.num_output_tokens <= seq.request.sampling.min_tokens
    # a constrained sequence gets an ending token early only where it is all that its constraint allows
    if token_id in seq.stop_token_ids and (not is_early or seq.constraint is not None):
        if token_id in seq.eos_token_ids:
            return Ending("stop", drop_last=True)
        return Ending("stop", token_id, drop_last=True, progress=_progress_of(seq, token_id))
    return None if matched is None or is_early else Ending("stop", matched, progress=_progress_of(seq, matched))


def _progress_of(seq: Sequence, stop_reason: int | str | None = None) -> Progress | None:
    """The state of a constrained sequence that was stopped before it ended by itself."""
    return None if seq.constraint is None else seq.constraint.progress(stop_reason)


def _runaway_of(seq: Sequence, repetition: RepetitionWatch) -> Ending | None:
    circles = repetition.append(seq.token_ids[-1])
    if circles is None:
        return None
    length, repeats = circles
    message = (
        f"the output ends with one pattern of {length} tokens {repeats} times over; change the prompt, set "
        f"sampling.repetition_penalty or sampling.temperature, or allow more by sampling.repetition_stop"
    )
    return Ending("repetition", error=RowError("runaway", message))


def completion_of(seq: Sequence, ending: Ending) -> Completion:
    """The completion of a sequence that ended."""
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
        prompt_logprobs=_whole_prompt_logprobs(seq),
        error=ending.error,
        progress=ending.progress,
    )


def refused(request: Request, error: RowError) -> Completion:
    """The completion of a request that was never queued."""
    return Completion(
        request_id=request.request_id,
        token_ids=(),
        finish_reason="error",
        num_prompt_tokens=len(request.prompt_token_ids),
        error=error,
    )


def _whole_prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """None unless asked for, and None if the sequence ended before its whole prompt was computed."""
    return None if seq.prompt_logprobs is None or seq.needs_prompt_logits else tuple(seq.prompt_logprobs)
