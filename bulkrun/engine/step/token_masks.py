"""Which tokens constrained sequences may take next: masks filled by worker threads while the model computes.

A mask depends only on tokens from before the step, so it need not wait for the step, nor the step for it: where those
are still on their way, the next forward pass begins without it, and it is filled once they are seen. Knows no grammar:
a constraint writes its own mask (see `bulkrun.request.TokenConstraint`).
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch

from bulkrun.engine.scheduling.sequence import Sequence
from bulkrun.request import TokenConstraint

NUM_THREADS = 4  # masks of one step are few or quick; more threads would take cores from the model on a CPU


class TokenMasks(NamedTuple):
    """The masks of one step; indices count the sequences that sample, in batch order."""

    mask_CW: torch.Tensor  # int32, on the host: bit k of word w allows token 32 w + k
    indices: list[int]  # C: whose mask it is; all the others may take any token
    errors: dict[int, str]  # those whose constraint could not say what may come next, and why


class _Filled(NamedTuple):
    is_restricted: bool
    error: str | None = None


class PendingMasks:
    """Masks on their way."""

    def __init__(self, indices: list[int], buffer: bytearray, tasks: list[Future[list[_Filled]]]) -> None:
        self._indices = indices
        self._buffer = buffer
        self._tasks = tasks

    def result(self) -> TokenMasks:
        """Wait for the masks."""
        filled = [one for task in self._tasks for one in task.result()]
        mask_CW = torch.frombuffer(self._buffer, dtype=torch.int32).view(len(filled), -1)
        restricted = [number for number, one in enumerate(filled) if one.is_restricted]
        if len(restricted) < len(filled):
            mask_CW = mask_CW[restricted]
        errors = {index: one.error for index, one in zip(self._indices, filled, strict=True) if one.error is not None}
        return TokenMasks(mask_CW, [self._indices[number] for number in restricted], errors)


class MaskFiller:
    """Worker threads that fill masks of `vocab_size` bits; the engine owns one."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = -(-vocab_size // 32)
        self._tasks: list[Future[list[_Filled]]] = []  # of the step before
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="token-masks")

    def start(self, seqs: SequenceOf[Sequence]) -> PendingMasks | None:
        """Begin with the masks of those that sample in a step; None where none is constrained and goes on."""
        wanted = [
            (index, seq.constraint)
            for index, seq in enumerate(seqs)
            if seq.constraint is not None and not (seq.has_ended or seq.num_unsent_tokens)  # by the token under way
        ]
        if not wanted:
            return None
        buffer = bytearray(4 * self._num_words * len(wanted))  # zeros: what a constraint does not write is forbidden
        words = memoryview(buffer).cast("i")
        masks = [words[first : first + self._num_words] for first in range(0, len(words), self._num_words)]
        work = [(constraint, mask) for (_, constraint), mask in zip(wanted, masks, strict=True)]
        share = -(-len(work) // NUM_THREADS)
        tasks = [self._threads.submit(_fill, work[first : first + share]) for first in range(0, len(work), share)]
        self._tasks = tasks
        return PendingMasks([index for index, _ in wanted], buffer, tasks)

    def wait_for_threads(self) -> None:
        """Wait until no thread uses a constraint any more, whatever the outcome."""
        wait(self._tasks)


def _fill(work: Iterable[tuple[TokenConstraint, memoryview]]) -> list[_Filled]:
    filled = []
    for constraint, mask in work:
        try:
            filled.append(_Filled(constraint.fill_mask(mask)))
        except ValueError as error:  # one grammar's trouble is one row's error
            filled.append(_Filled(is_restricted=False, error=str(error)))
    return filled
