"""The contract between the two columns: what a job asks of an engine and what it gets back.

Standard library only. The job column (torch-free) and the tensor column (job-free) meet here and nowhere
else; `bulkrun.launch` is the one module that knows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol

from bulkrun.sampling_params import ABSENT, BOUNDS, STRUCTURE_BOUNDS, LogprobsOver, SamplingParams
from bulkrun.sampling_structures import Begun, RepetitionStop, StructuredOutput, Thinking, ToolCalls, ToolFormat

__all__ = [
    "ABSENT",
    "BOUNDS",
    "ERROR_CODES",
    "STRUCTURE_BOUNDS",
    "Begun",
    "Completion",
    "Engine",
    "EngineStats",
    "FinishReason",
    "LogprobsOver",
    "PartKind",
    "PartialOutput",
    "Progress",
    "RepetitionStop",
    "Request",
    "RowError",
    "SamplingParams",
    "StopMatcher",
    "StopMatcherFactory",
    "StructuredOutput",
    "Thinking",
    "TokenConstraint",
    "TokenConstraintFactory",
    "TokenLogprob",
    "ToolCalls",
    "ToolFormat",
    "part_name",
]

FinishReason = Literal[
    "stop",  # the end-of-sequence token, a stop token or a stop string
    "length",  # max_tokens, or the model's length
    "tool_calls",  # as stop, of an answer that calls tools (sampling.tool_calls); no engine says it
    "repetition",  # the output ran in circles (sampling.repetition_stop); error_code runaway
    "timeout",  # the row's time was over (run.row_timeout); error_code timeout
    "error",  # it never ran, or the engine failed; error_code says why
]

# Every code that a row's error_code can have. A row has one if and only if it failed, whatever its finish_reason.
ERROR_CODES: Mapping[str, str] = MappingProxyType(
    {
        "bad_input": "the row cannot be read, or a value in it is not what the job needs",
        "bad_template": "a template failed on this row's values",
        "empty_prompt": "the prompt is empty",
        "too_long": "the prompt leaves no room for an output (model's length, run.max_tokens_per_row)",
        "no_answer": "the output ended inside its thoughts (sampling.thinking), which are in the column reasoning",
        "invalid_schema": "the text is not what structured_outputs or tool_choice asks for, or was cut before its end",
        "grammar_failed": "the schema, regex, grammar or bad_words cannot be used, or left no token to go on with",
        "runaway": "the output ran in circles; response has the text so far",
        "timeout": "the row's time was over; response has the text so far",
        "engine_error": "the engine failed on this row alone, or its numbers were not finite",
    }
)


class RowError(NamedTuple):
    """Why a row has no answer: a code of `ERROR_CODES` to group by, and a message that names the place and the fix."""

    code: str
    message: str


# Where an output stands in its structure: something has to follow, it is whole and could go on, or nothing can follow.
Progress = Literal["unfinished", "whole", "closed"]


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate: a prompt as token ids and how to go on from it.

    `seed` (63 bits) is the noise of this request: a function of (job seed, row id, sample), so that a result
    does not depend on neighbours, order or resume. `output_token_ids` are tokens that an earlier attempt
    already generated; they count as output and generation continues after them. `priority`: smaller goes
    first (vLLM's meaning), and takes the place of a running request of worse priority when there is no room otherwise;
    its tokens are the same. `parts`: of a prompt of several texts, to embed or classify each by itself, how many tokens
    each has; empty where it is one.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    parts: tuple[int, ...] = ()


# What the parts of a request are: pairs of texts, texts, or sides: of each pair its first text, then its second.
PartKind = Literal["pair", "text", "side"]


def part_name(kind: PartKind, number: int) -> str:
    """What errors call one part of a request, `number` from 0 on."""
    return f"pair {number // 2}, text {number % 2}" if kind == "side" else f"{kind} {number}"


class TokenLogprob(NamedTuple):
    """The natural log-probability of one generated token, and of the most likely alternatives that have any."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one request. Every request that was added ends as exactly one of these.

    `token_ids` holds the output without the end-of-sequence or stop token, but with the tokens of a matched
    stop string (the text is cut by whoever decodes it). `stop_reason` is the stop string or stop token id that
    ended it, None for end-of-sequence. `error` is set if and only if `finish_reason` is neither "stop" nor "length":
    codes `runaway` (repetition), `timeout`, `grammar_failed`, `engine_error` and those of a refusal. What was generated
    before is kept in `token_ids`. `prompt_logprobs` has an entry per prompt token, None for the first. `progress` says
    where the text of a constrained output stands that its limit or a stop ended; None where the model itself ended it.
    `embedding` is what an engine that embeds or classifies made of the prompt, its vector or its scores: float32
    numbers, little-endian, one after another (of several `parts` those of the first, then of the next); such an engine
    generates nothing (`token_ids` is empty, `finish_reason` "stop").
    """

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0  # tokens generated, the ending token included
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: RowError | None = None
    progress: Progress | None = None
    embedding: bytes | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the generated tokens, None where `logprobs` were not asked for."""
        return None if self.logprobs is None else sum(entry.logprob for entry in self.logprobs)


class PartialOutput(NamedTuple):
    """What an unfinished request has generated so far; goes into `Request.output_token_ids` on resume."""

    request_id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the engine was made (tokens, steps) and levels now (running, waiting, KV use 0..1)."""

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_steps: int = 0
    num_scheduled_seqs: int = 0  # sequences in a step, summed over the steps
    num_scheduled_tokens: int = 0  # positions computed, of prompts and outputs
    num_admitted: int = 0  # times that a sequence was given a row (again after a preemption)
    num_prompt_tokens: int = 0  # prompt tokens computed (cached ones not counted)
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_output_tokens: int = 0
    num_forced_tokens: int = 0  # of those, the ones that a constraint alone decided, without a step
    num_preemptions: int = 0

    def counted_after(self, before: EngineStats) -> EngineStats:
        """These levels, and the counters of both: this engine came after that one."""
        counters = (one.name for one in fields(self) if one.name not in _LEVELS)
        return replace(self, **{name: getattr(self, name) + getattr(before, name) for name in counters})


_LEVELS = ("num_running", "num_waiting", "kv_cache_usage")


class Engine(Protocol):
    """What a job needs of an engine. Made by `bulkrun.launch`; played by a small fake in the job tests."""

    @property
    def max_model_len(self) -> int:
        """Most tokens (prompt + output) one sequence may have."""

    @property
    def max_num_seqs(self) -> int:
        """Most sequences that run at once."""

    def add_request(self, request: Request) -> None:
        """Queue a request. A request that cannot be served ends as an error `Completion`, never as a raise."""

    def step(self) -> list[Completion]:
        """Run one forward pass and return the requests that ended in it (any order)."""

    def has_unfinished(self) -> bool:
        """Whether any added request has not ended yet."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests without a completion."""

    def partial_outputs(self) -> list[PartialOutput]:
        """Output so far of every request that has some and has not ended."""

    def stats(self) -> EngineStats:
        """Counters and levels, cheap enough for every step."""


class StopMatcher(Protocol):
    """Watches the growing text of one sequence for its stop strings."""

    def append(self, token_id: int) -> str | None:
        """Add one token; the stop string that is now complete in the text, or None."""


class StopMatcherFactory(Protocol):
    """Makes the matcher of a sequence with stop strings; injected, so that the engine knows no text."""

    def __call__(self, stop: Sequence[str]) -> StopMatcher: ...


class TokenConstraint(Protocol):
    """Which tokens one sequence may take next: a grammar, a thinking budget, lists of tokens, or several of them.

    One thread at a time uses it.
    """

    def fill_mask(self, mask: memoryview) -> bool:
        """Write the allowed tokens into `mask` (int32 words, bit k of word w: token 32 w + k); False: all are allowed.

        `mask` is not touched when the answer is False. Releases the GIL where it takes long. Raises ValueError where it
        cannot say what may follow: `grammar_failed` for this sequence, nothing for the others.
        """

    def accept(self, token_id: int) -> str | None:
        """Go on with a token that was generated; None, or why no output can follow any more (`grammar_failed`)."""

    def forced_tokens(self) -> Sequence[int]:
        """Tokens that have to come next, in this order: the mask of each would allow no other one (or other ends).

        Empty where there is a choice, or where finding out would cost as much as a mask. There may be more behind them:
        ask again when they have been accepted.
        """

    def progress(self, stop_reason: int | str | None = None) -> Progress:
        """Where the output stands after its last token, or before the stop token or stop string that this completed.

        Where the sampling includes the stop, it is the place behind that.
        """


class TokenConstraintFactory(Protocol):
    """Makes the constraint of a sequence, None where its sampling needs none.

    Injected, so that the engine knows no text. Raises ValueError, with what is wrong, for a schema, regex, grammar or
    word that cannot be used. `prompt_token_ids` tell whether the prompt ends in the middle of thoughts.
    """

    def __call__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> TokenConstraint | None: ...
