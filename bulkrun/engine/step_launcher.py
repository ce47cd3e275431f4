"""Puts a step on its way: the forward pass, the masks of constraints beside it, and the choice of tokens.

Knows what a step waits for. Knows no queues, and not what becomes of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from bulkrun.engine.out_of_memory import MemoryGuard
from bulkrun.engine.scheduling.scheduled_batch import ScheduledBatch
from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.engine.step.model_runner import ModelRunner
from bulkrun.engine.step.pending_step import PendingStep
from bulkrun.engine.step.token_masks import MaskFiller, PendingMasks


class StepLauncher:
    """Launches the steps of one engine, whose `memory` hears of every attempt."""

    def __init__(self, model_runner: ModelRunner, memory: MemoryGuard, vocab_size: int) -> None:
        self._model_runner = model_runner
        self._memory = memory
        self._vocab_size = vocab_size
        self._mask_filler: MaskFiller | None = None  # as long as nothing is constrained

    def expect_constraints(self) -> None:
        """From now on there are constrained sequences."""
        if self._mask_filler is None:
            self._mask_filler = MaskFiller(self._vocab_size)

    def wait_for_masks(self) -> None:
        """After an interrupted launch: wait until no thread uses a constraint any more."""
        if self._mask_filler is not None:
            self._mask_filler.wait_for_threads()

    def launch(self, batch: ScheduledBatch, land: Callable[[], None]) -> PendingStep | None:
        """Put a step on its way; None where memory ran out for it.

        Masks are filled while the model computes. Those that depend on tokens under way have to wait until `land` has
        taken these in, while the device goes on with this step's forward pass.
        """
        sampling = batch.sampling_seqs()
        depends = self._mask_filler is not None and any(s.num_pending and s.constraint is not None for s in sampling)
        masks = None if depends else self._masks(sampling)
        logits = self._memory.attempt(lambda: self._model_runner.compute(batch))
        if depends and logits is not None:
            land()
            masks = self._masks(sampling)
        launched = None if logits is None else self._memory.attempt(lambda: self._model_runner.sample(logits, masks))
        if launched is None:
            if masks is not None:
                masks.result()  # the next step asks the same constraints
            return None
        self._memory.worked()
        launched.expect()
        return launched

    def _masks(self, sampling: list[Sequence]) -> PendingMasks | None:
        return None if self._mask_filler is None else self._mask_filler.start(sampling)
