"""From a request to a sequence, with the tools that watch over it; or the reason why it cannot be served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from bulkrun.engine.scheduling.refusals import needs_constraint, refusal
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import Request, RowError, SamplingParams, StopMatcherFactory, TokenConstraintFactory


class SequenceFactory:
    """Makes the sequences of one engine and numbers them by arrival."""

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        stop_matcher_factory: StopMatcherFactory | None,
        constraint_factory: TokenConstraintFactory | None,
        clock: Callable[[], float],
    ) -> None:
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self.eos_token_ids = frozenset(_known(eos_token_ids, vocab_size))
        self._stop_matcher_factory = stop_matcher_factory
        self._constraint_factory = constraint_factory
        self._clock = clock
        self._num_made = 0
        self._known_sampling: SamplingParams | None = None  # the last one that was not refused: rows share it

    def make(self, request: Request) -> Sequence | RowError:
        """The request's sequence, with its prompt alone."""
        error = refusal(
            request,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            has_stop_matcher=self._stop_matcher_factory is not None,
            has_constraints=self._constraint_factory is not None,
            knows_sampling=request.sampling is self._known_sampling,
        )
        if error is not None:
            return error
        self._known_sampling = request.sampling
        try:
            return self._make(request)
        except ValueError as problem:  # of the grammar: nothing else here can be wrong
            return RowError("grammar_failed", str(problem))

    def _make(self, request: Request) -> Sequence:
        matcher = constraint = None
        if request.sampling.stop:
            assert self._stop_matcher_factory is not None, "such a request was refused"
            matcher = self._stop_matcher_factory(request.sampling.stop)
        if needs_constraint(request):
            assert self._constraint_factory is not None, "such a request was refused"
            constraint = self._constraint_factory(request.sampling, request.prompt_token_ids)
        self._num_made += 1
        return Sequence(
            request,
            arrival=self._num_made,
            arrived_at=self._clock(),
            max_model_len=self._max_model_len,
            eos_token_ids=self.eos_token_ids,
            stop_matcher=matcher,
            constraint=constraint,
        )


def _known(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    """The ids that the model can generate: tokens may have been added to a tokenizer but not to the embeddings."""
    ids = sorted(set(token_ids))
    known = [token_id for token_id in ids if 0 <= token_id < vocab_size]
    if len(known) < len(ids):
        logging.getLogger(__name__).warning(
            "end-of-sequence ids %s are not among the model's %d tokens; they end nothing",
            [token_id for token_id in ids if token_id not in known],
            vocab_size,
        )
    return known
