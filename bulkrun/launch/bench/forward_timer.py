"""A model with a stop watch: how much of a run is forward passes. For the CPU: there a call returns when it is done."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.models.config import ModelConfig
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.language_model import LanguageModel
from bulkrun.ops import AttentionMetadata


class ForwardTimer:
    """A `LanguageModel` that adds up the seconds spent in another one."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self.config: ModelConfig = model.config
        self.seconds = 0.0

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def device(self) -> torch.device:
        return self._model.device

    def __call__(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        start = time.perf_counter()
        hidden_TE = self._model(input_ids_T, positions_T, kv_cache, meta)
        self.seconds += time.perf_counter() - start
        return hidden_TE

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        start = time.perf_counter()
        logits_SV = self._model.compute_logits(hidden_SE)
        self.seconds += time.perf_counter() - start
        return logits_SV


@contextmanager
def timed_forward(engine: LLMEngine) -> Iterator[ForwardTimer | None]:
    """The engine's model under the watch for a while; None on a GPU, where calls return before the work is done."""
    model = engine.model_runner.model
    if engine.config.device.type != "cpu":
        yield None
        return
    timer = ForwardTimer(model)
    engine.model_runner.model = timer
    try:
        yield timer
    finally:
        engine.model_runner.model = model
