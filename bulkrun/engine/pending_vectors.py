"""A step of embedding that has been put on its way, and what the host gets of it once it waits for it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import torch

from bulkrun.engine.scheduling.refusals import without_output
from bulkrun.request import Completion, Request, RowError

_NOT_NUMBERS = RowError(
    "engine_error",
    "the numbers made of this row's text are not finite; try engine.dtype float32, or check the weights",
)


class PendingVectors:
    """The requests of a step, and their vectors on the way to the host."""

    def __init__(self, requests: Sequence[Request], vectors_SD: torch.Tensor) -> None:
        """vectors_SD: float32, contiguous, in the requests' order."""
        self.requests = requests
        self._copied: torch.cuda.Event | None = None
        self._vectors_SD = vectors_SD.to("cpu", non_blocking=True)
        if vectors_SD.is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def completions(self) -> Iterator[Completion]:
        """Wait for the vectors: one completion each."""
        if self._copied is not None:
            self._copied.synchronize()
        raw = ctypes.string_at(self._vectors_SD.data_ptr(), self._vectors_SD.nbytes)
        size = self._vectors_SD.shape[1] * self._vectors_SD.itemsize
        is_finite = self._vectors_SD.isfinite().all(dim=1).tolist()
        for row, request in enumerate(self.requests):
            vector = raw[row * size : (row + 1) * size]
            yield _completion(request, vector) if is_finite[row] else without_output(request, _NOT_NUMBERS)


def _completion(request: Request, embedding: bytes) -> Completion:
    num_tokens = len(request.prompt_token_ids)
    return Completion(request.request_id, (), "stop", num_prompt_tokens=num_tokens, embedding=embedding)
