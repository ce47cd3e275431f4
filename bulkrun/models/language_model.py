"""What the engine needs of a model: hidden states over a paged cache, and logits of some of them."""

from __future__ import annotations

from typing import Protocol

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class LanguageModel(Protocol):
    """A decoder-only transformer on its device, weights loaded. The caller holds `torch.inference_mode()`."""

    @property
    def config(self) -> ModelConfig:
        """What it is."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states and the KV cache."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def is_capturable(self) -> bool:
        """Whether a CUDA graph can hold its forward: it never waits for the device, whatever the sizes."""

    @property
    def is_in_fp8(self) -> bool:
        """Whether matrices are multiplied in fp8: at twice the rate, and each with one more launch."""

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: KVCache,
        meta: AttentionMetadata,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the tokens' keys and values to the cache.

        logits_indices: int64 [S], ascending: then only of these tokens, [S, E], as nothing reads the others.
        """

    def compute_logits(self, hidden_SE: torch.Tensor, *, as_computed: bool = False) -> torch.Tensor:
        """Logits float32 [S, V] of the rows that sample; `as_computed`: or, with the same values, the head's dtype."""
