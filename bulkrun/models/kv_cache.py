"""The paged KV cache as tensors: two per layer that attends, [N, B, K, D], and the states of those that do not.

Where values are within their keys (latent attention) the second one is a view of the first.

Which block and which row belong to whom is the engine's business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.host_memory import untouched_zeros
from bulkrun.models.recurrent_state import RecurrentState
from bulkrun.ops.attention.paged_attention import are_in_keys
from bulkrun.ops.cpu.touch_pages import touch_pages
from bulkrun.ops.dispatch import uses_compiled

# a token's keys in one layer, from which on a step reads so much that huge pages (a tenth less time for attention) are
# worth what it takes the kernel to find them
_LONG_ROW_BYTES = 1024
_TOUCHED_TOGETHER = 64  # blocks: a huge page of each tensor, where a token's keys are 2 KiB


@dataclass(slots=True)
class KVCache:
    """Keys and values of every layer that attends, in their order, one tensor for layers that share them.

    Block 0 is the null block.
    """

    k: list[torch.Tensor]  # per layer: [N, B, K, D]; K and D may be other ones in another layer; none may attend
    v: list[torch.Tensor]  # the same; or the last dimensions of keys
    num_blocks: int  # in the pool, the null block included
    block_size: int  # tokens
    dtype: torch.dtype  # of keys and values
    device: torch.device
    num_touched_blocks: int = 0
    states: list[RecurrentState] = field(default_factory=list)  # of every layer that keeps one, in their order

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        num_layers: int | None = None,
    ) -> KVCache:
        """Zeroed blocks (a masked-out key must still be a finite number) of all layers that attend, or of so many.

        On a CPU only used ones take memory.

        Raises what the allocator raises: torch.OutOfMemoryError on a GPU, OSError on a CPU.
        """

        def per_layer() -> list[torch.Tensor]:
            made: list[torch.Tensor] = []
            for layer, kv in enumerate(config.layers_kv[:num_layers]):
                shape = (num_blocks, block_size, kv.num_heads, kv.head_dim)
                is_own = kv.source == layer
                made.append(_zeros(shape, dtype, torch.device(device)) if is_own else made[kv.source])
            return made

        k = per_layer()
        v = per_layer() if config.latent_dim is None else [keys[..., -config.latent_dim :] for keys in k]
        return cls(k, v, num_blocks, block_size, dtype, torch.device(device))

    def clear_blocks(self, block_ids: torch.Tensor) -> None:
        """Zero these blocks (int64) in every layer. By bytes, which are zero in every dtype: fp8 cannot be filled."""
        for cache in self.tensors:
            cache.view(torch.uint8).index_fill_(0, block_ids, 0)

    def touch(self, num_blocks: int) -> None:
        """On a CPU: have the kernel find memory for the first `num_blocks` blocks, faster than a step's writes would.

        New blocks are handed out in order, so `num_touched_blocks` tells those that have it.
        """
        if num_blocks <= self.num_touched_blocks or not self.k or not uses_compiled(self.k[0]):
            return
        end = min(num_blocks + -num_blocks % _TOUCHED_TOGETHER, self.num_blocks)
        by_size: dict[int, dict[int, torch.Tensor]] = {}
        for cache in self.tensors:
            by_size.setdefault(cache.nbytes, {})[cache.data_ptr()] = cache  # once where layers share it
        for same in by_size.values():
            touch_pages([*same.values()], self.num_touched_blocks, end)
        self.num_touched_blocks = end

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Whole ones, each layer's."""
        return self.k if self.k and are_in_keys(self.v[0], self.k[0]) else [*self.k, *self.v]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    row_bytes = math.prod(shape[2:]) * dtype.itemsize
    return untouched_zeros(shape, dtype, huge_pages=row_bytes >= _LONG_ROW_BYTES)


def bytes_per_block(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one block takes over all layers that attend, keys and values."""
    return block_size * config.kv_size * dtype.itemsize
