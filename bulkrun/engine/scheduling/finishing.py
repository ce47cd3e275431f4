"""When a sequence ends, and what its completion says. Pure Python; what never became a sequence: `refusals`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from bulkrun.engine.scheduling.repetition import RepetitionWatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Completion, FinishReason, Progress, RowError, TokenConstraint, TokenLogprob


class Ending(NamedTuple):
    """Why a sequence ended; `drop_last`: the token that ended it is not part of the answer."""

    finish_reason: FinishReason
    stop_reason: int | str | None = None
    drop_last: bool = False
    error: RowError | None = None
    progress: Progress | None = None


NOT_NUMBERS = Ending(
    "error",
    error=RowError(
        "engine_error",
        "the model's logits are not finite numbers for this row; try engine.dtype float32, or check the weights",
    ),
)


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
    circle = repetition.append(seq.token_ids[-1])
    if circle is None:
        return None
    message = (
        f"the output ends with one pattern of {circle.length} tokens {circle.repeats} times over; change the prompt, "
        f"set sampling.repetition_penalty or sampling.temperature, or allow more by sampling.repetition_stop"
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


def _whole_prompt_logprobs(seq: Sequence) -> tuple[TokenLogprob | None, ...] | None:
    """None unless asked for, and None if the sequence ended before its whole prompt was computed."""
    return None if seq.prompt_logprobs is None or seq.needs_prompt_logits else tuple(seq.prompt_logprobs)
