"""A step that has been put on its way, and what the host gets of it once it waits for it.

On a GPU the device may be a whole step behind the host: the next step is planned and launched before this one's tokens
are known. Knows no model and no queues.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.sampler import SampledTokens
from bulkrun.engine.step.token_masks import TokenMasks
from bulkrun.request import SamplingParams, TokenLogprob

_DEAD_END = "the grammar allows none of the model's tokens to come next; check that its text can be written with them"
_LISTS = ("bad_words", "allowed_token_ids")


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the host needs of a step: parallel lists over the sequences that sampled."""

    seqs: list[Sequence]
    token_ids: list[int]
    is_valid: list[bool]  # False where the model's logits were not numbers
    logprobs: list[TokenLogprob | None]
    grammar_errors: dict[int, str] = field(default_factory=dict)  # index -> why its token must not be taken
    overtaken: frozenset[int] = frozenset()  # who got forced tokens instead before the step had chosen theirs


class PendingStep:
    """The sequences that sample in a step, and their tokens on the way to the host; None: nobody samples."""

    def __init__(
        self, seqs: list[Sequence], sampled: SampledTokens | None = None, masks: TokenMasks | None = None
    ) -> None:
        self.seqs = seqs
        self._sampled = None if sampled is None else sampled.on_the_way_to_host()
        self._masks = masks
        self._overtaken = frozenset(index for index, seq in enumerate(seqs) if seq.num_unsent_tokens)

    def expect(self) -> None:
        """From now on a token is pending for each of the sequences that has not got it already."""
        self._count(1)

    def result(self) -> StepOutput:
        """Wait for the device; nothing is pending any more."""
        self._count(-1)
        if self._sampled is None:
            return StepOutput([], [], [], [])
        sampled = self._sampled.arrived()
        return StepOutput(
            self.seqs,
            sampled.token_ids.tolist(),
            sampled.is_valid.tolist(),
            sampled.logprobs_of(self.seqs),
            {} if self._masks is None else _grammar_errors(self.seqs, self._masks, sampled),
            self._overtaken,
        )

    def _count(self, pending: int) -> None:
        for index, seq in enumerate(self.seqs):
            if index not in self._overtaken:
                seq.num_pending += pending


def _grammar_errors(seqs: list[Sequence], masks: TokenMasks, sampled: SampledTokens) -> dict[int, str]:
    """Whose constraint failed, or left no token at all, in which case the sampled one means nothing."""
    has_choice = [] if sampled.has_choice is None else sampled.has_choice.tolist()
    dead_ends = {index: _dead_end(seqs[index].request.sampling) for index, has in enumerate(has_choice) if not has}
    return dead_ends | masks.errors


def _dead_end(sampling: SamplingParams) -> str:
    lists = [name for name in _LISTS if getattr(sampling, name)]
    if not lists:
        return _DEAD_END
    bound = [name for name in ("structured_outputs", "thinking") if getattr(sampling, name) is not None]
    return (
        f"sampling.{' and '.join([*bound, *lists])}: no token is left that may come next, nor the end of the output; "
        "forbid less"
    )
