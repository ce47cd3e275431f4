"""The engine of jobs that embed or classify: requests in, numbers of each out, a pass over whole texts per step.

Wires the queue (who shares a step) and the model (tensors) together. Speaks token ids; knows no text, files, rows or
jobs. Implements `bulkrun.request.Engine`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bulkrun.engine.counters import EngineCounters
from bulkrun.engine.embedding_loading import EmbeddingSizes, ready_classification_model, ready_embedding_model
from bulkrun.engine.memory_errors import MEMORY_ERRORS, is_out_of_memory
from bulkrun.engine.pending_vectors import PendingVectors
from bulkrun.engine.scheduling.refusals import text_refusal, without_output
from bulkrun.engine.scheduling.text_queue import TextQueue
from bulkrun.errors import first_line
from bulkrun.models.classification.classification_model import ClassificationModel
from bulkrun.models.embedding.embedding_model import EmbeddingModel
from bulkrun.request import Completion, EngineStats, PartialOutput, Request, RowError
from bulkrun.settings import ClassificationArgs, EmbeddingArgs, EngineArgs


class EmbeddingEngine:
    """Not thread-safe: one caller adds and steps."""

    def __init__(self, model: EmbeddingModel | ClassificationModel, sizes: EmbeddingSizes) -> None:
        self.sizes = sizes
        self._model = model
        self._max_num_batched_tokens = sizes.max_num_batched_tokens  # less once memory ran out
        self._queue = TextQueue()
        self._ended: list[Completion] = []  # not returned yet
        self._under_way: PendingVectors | None = None
        self._counters = EngineCounters()

    @classmethod
    def from_model_dir(
        cls, path: Path | str, output: EmbeddingArgs | ClassificationArgs | None = None, **settings: Any
    ) -> EmbeddingEngine:
        """Load a Hugging Face model directory; `settings` are those of `EngineArgs`.

        output: what becomes of a text: a vector or scores, and how; None: a vector as the model's files say. Raises
        what `ready_embedding_model` and `ready_classification_model` do.
        """
        args = EngineArgs(**settings)
        if isinstance(output, ClassificationArgs):
            return cls(*ready_classification_model(Path(path), output, args))
        return cls(*ready_embedding_model(Path(path), output or EmbeddingArgs(), args))

    @property
    def max_model_len(self) -> int:
        """Most tokens a text may have."""
        return self.sizes.max_model_len

    @property
    def max_num_seqs(self) -> int:
        """Most texts of one step."""
        return self.sizes.max_num_seqs

    @property
    def dtype(self) -> torch.dtype:
        """What the transformer computes in."""
        return self._model.encoder.dtype

    @property
    def dimensions(self) -> int:
        """Numbers of each text: of its vector, or a score for each label."""
        return self._model.dimensions

    def add_request(self, request: Request) -> None:
        """Queue a request. One that cannot be served ends as an error completion of the next step."""
        vocab_size = self._model.encoder.config.vocab_size
        error = text_refusal(request, max_model_len=self.max_model_len, vocab_size=vocab_size)
        if error is None:
            self._queue.add(request)
        else:
            self._ended.append(without_output(request, error))

    def step(self) -> list[Completion]:
        """Launch one forward pass and return the requests that are known to have ended (any order).

        Without `async_scheduling` the pass lands at once; with it, in the next call, so that the device does not wait
        for the host. When it raises, Ctrl-C included, no request is lost: those that had not ended wait again.
        """
        try:
            launched = self._launch()
            self._land()
            self._under_way = launched
            if not self.sizes.async_scheduling:
                self._land()
        except BaseException:
            self._start_over()
            raise
        completions, self._ended = self._ended, []
        return completions

    def has_unfinished(self) -> bool:
        """Whether any added request has not been returned by `step` yet."""
        return bool(self._ended or len(self._queue))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests without a completion."""
        ids = set(request_ids)
        self._queue.remove(ids)
        self._ended = [completion for completion in self._ended if completion.request_id not in ids]

    def partial_outputs(self) -> list[PartialOutput]:
        """None: a text is embedded in one step."""
        return []

    def stats(self) -> EngineStats:
        """Counters and levels, cheap enough for every step."""
        num_waiting = self._queue.num_waiting
        return EngineStats(
            num_running=len(self._queue) - num_waiting, num_waiting=num_waiting, **asdict(self._counters)
        )

    def _launch(self) -> PendingVectors | None:
        """Put the next step on its way; None where nobody waits, or memory ran out for it."""
        requests = self._queue.take(self.max_num_seqs, self._max_num_batched_tokens)
        if not requests:
            return None
        try:
            launched = PendingVectors(requests, self._model([request.prompt_token_ids for request in requests]))
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            shortage = first_line(error)  # not the error: its frames hold the tensors of the step
        else:
            self._counters.count_texts(len(requests), sum(len(request.prompt_token_ids) for request in requests))
            return launched
        self._shrink(requests, shortage)
        return None

    def _land(self) -> None:
        """Wait for the step under way, if there is one, and take in what it brought, but for what was aborted."""
        landed, self._under_way = self._under_way, None
        if landed is not None:
            wanted = self._queue.taken_ids
            self._end([completion for completion in landed.completions() if completion.request_id in wanted])

    def _end(self, completions: list[Completion]) -> None:
        self._ended += completions
        self._queue.remove({completion.request_id for completion in completions})

    def _shrink(self, requests: list[Request], shortage: str) -> None:
        """After memory ran out: smaller steps from now on, or, for a text that was alone, its end."""
        self._land()  # its memory is free then
        self._model.encoder.free_scratch()
        if self.sizes.device.type == "cuda":
            torch.cuda.empty_cache()
        if len(requests) == 1:
            self._end([without_output(requests[0], _too_large(requests[0], shortage))])
            return
        self._queue.put_back()
        num_tokens = sum(len(request.prompt_token_ids) for request in requests)
        self._max_num_batched_tokens = max(num_tokens // 2, 1)
        logging.getLogger(__name__).warning(
            "out of memory; nothing is lost, going on with steps of %d tokens; to begin with that, set "
            "engine.max_num_batched_tokens: %d (%s)",
            self._max_num_batched_tokens,
            self._max_num_batched_tokens,
            shortage,
        )

    def _start_over(self) -> None:
        """Clean up after a step that was interrupted."""
        self._under_way = None
        self._queue.put_back()
        self._queue.remove({completion.request_id for completion in self._ended})


def _too_large(request: Request, shortage: str) -> RowError:
    return RowError(
        "engine_error",
        f"out of memory for this text of {len(request.prompt_token_ids)} tokens alone ({shortage}); shorten it, lower "
        "engine.max_model_len and set run.on_too_long, or free what other processes hold",
    )
