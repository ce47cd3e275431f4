"""A KV cache of one step: texts in whole blocks, which are dealt out anew in each step. Knows no model.

No token of an earlier step is ever read again, and a layer reads what it has just written itself: one layer's memory
serves all, and so do one layer's states. Not where layers differ in their keys, or read those of earlier ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from bulkrun.blocks import NULL_BLOCK
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.recurrent_state import RecurrentState
from bulkrun.ops import AttentionMetadata


class Step(NamedTuple):
    """Where a step's tokens are in their texts, and where their keys and values go."""

    positions_T: torch.Tensor  # int64
    cache: KVCache  # of all layers
    meta: AttentionMetadata


class StepCache:
    """Grows with the largest step."""

    def __init__(self, config: ModelConfig, block_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._block_size, self._dtype, self._device = block_size, dtype, device
        self._cache: KVCache | None = None
        self._states: list[RecurrentState] = []
        self._num_rows = 0  # of these

    def lay_out(self, texts: PackedTexts) -> Step:
        """Give each text its blocks; what may be read along with them is finite."""
        text_T = texts.text_of_token()
        positions_T = texts.positions(text_T)
        num_blocks = -(-texts.lens_S // self._block_size)
        first_block_S = 1 + num_blocks.cumsum(0) - num_blocks  # behind the null block
        first_slot_S = first_block_S * self._block_size
        cache = self._cache_for(sum(-(-length // self._block_size) for length in texts.lens))
        _clear(
            cache, _tails(first_slot_S + texts.lens_S, first_slot_S + num_blocks * self._block_size, self._block_size)
        )
        slots_T = first_slot_S[text_T] + positions_T
        meta = self._metadata(texts, slots_T, first_block_S, num_blocks)
        copies = self._config.num_kv_layers if self._are_alike else 1
        states = self._states_for(len(texts.lens)) * self._config.num_state_layers
        return Step(positions_T, replace(cache, k=cache.k * copies, v=cache.v * copies, states=states), meta)

    def free(self) -> None:
        """Give the memory back."""
        self._cache = None
        self._states, self._num_rows = [], 0

    def _cache_for(self, num_blocks: int) -> KVCache:
        """A cache with room for so many blocks besides the null block; a larger step replaces it."""
        if self._cache is None or self._cache.num_blocks <= num_blocks:
            self._cache = None  # the old one goes before the new one comes
            self._cache = KVCache.allocate(
                self._config, num_blocks + 1, self._block_size, self._dtype, self._device,
                num_layers=1 if self._are_alike else None,
            )  # fmt: skip
        return self._cache

    @property
    def _are_alike(self) -> bool:
        return self._config.unlike_layers is None

    def _states_for(self, num_texts: int) -> list[RecurrentState]:
        """A row of states for each text; a step of more texts, which may well have fewer tokens, replaces them."""
        if self._num_rows < num_texts:
            self._states, self._num_rows = [], 0  # the old ones go first, and are not there if the new ones do not fit
            self._states = RecurrentState.allocate(self._config, num_texts, self._dtype, self._device, num_layers=1)
            self._num_rows = num_texts
        return self._states

    def _metadata(
        self, texts: PackedTexts, slots_T: torch.Tensor, first_block_S: torch.Tensor, num_blocks: torch.Tensor
    ) -> AttentionMetadata:
        """Whole prompts; those of one token count as decode sequences, and being the shortest come first."""
        longest, num_single = texts.lens[-1], texts.lens.count(1)
        block_M = torch.arange(-(-longest // self._block_size), device=self._device)
        tables_SM = torch.where(block_M < num_blocks[:, None], first_block_S[:, None] + block_M, NULL_BLOCK)
        cu_seqlens = torch.nn.functional.pad(texts.ends_S, (1, 0))
        return AttentionMetadata(
            slot_mapping_T=slots_T,
            block_tables_SM=tables_SM.int(),
            context_lens_S=texts.lens_S.int(),
            cu_seqlens_q=cu_seqlens.int(),
            num_decode_seqs=num_single,
            max_query_len=longest,
            max_context_len=longest,
            max_decode_keys=num_single,
            rows_S=torch.arange(len(texts.lens), device=self._device),
        )


def _tails(ends_S: torch.Tensor, block_ends_S: torch.Tensor, block_size: int) -> torch.Tensor:
    """The slots [S * B] behind each text's end in its last block; slot 0, of the null block, where there is none."""
    slots = ends_S[:, None] + torch.arange(block_size, device=ends_S.device)
    return torch.where(slots < block_ends_S[:, None], slots, 0).flatten()


def _clear(cache: KVCache, slots: torch.Tensor) -> None:
    """Zero slots that may be read along: a masked-out key must be a finite number, whatever an earlier step left."""
    for blocks in cache.tensors:
        blocks.view(-1, blocks.shape[2] * blocks.shape[3]).index_fill_(0, slots, 0)
