"""Every size of the engine, worked out once: from what was asked for, the model, and the memory that is there.

Knows memory and the model's shape. Knows no requests. A value that cannot work is refused here, by name and with
the fix, so that nothing later has to doubt a size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.engine.batching import DEFAULT_WINDOW_S, Batching, check_batching
from bulkrun.engine.host_memory import available_ram_bytes
from bulkrun.errors import UsageError
from bulkrun.models.config import ModelConfig
from bulkrun.models.kv_cache import bytes_per_block

BLOCK_SIZE = 16
CPU_RAM_SHARE = 0.25  # of the RAM that is available; the rest is the job's and the other processes'
DEFAULT_MAX_NUM_SEQS = {"cpu": 128, "cuda": 1024}
DEFAULT_MAX_NUM_BATCHED_TOKENS = {"cpu": 1024, "cuda": 8192}
_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Sizes that are known to work together. Names are vLLM's; `num_blocks` counts the null block too."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool
    dtype: torch.dtype
    device: torch.device
    batching: Batching = "continuous"
    batching_window_s: float = DEFAULT_WINDOW_S
    async_scheduling: bool = False

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of a sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @classmethod
    def resolve(
        cls,
        model_config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_model_len: int | None = None,
        block_size: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_memory_bytes: int | None = None,
        enable_prefix_caching: bool = True,
        batching: Batching = "continuous",
        batching_window_s: float = DEFAULT_WINDOW_S,
        async_scheduling: bool | None = None,
    ) -> EngineConfig:
        """Fill in what was not given. Raises UsageError, naming key and fix, for what cannot work.

        On a GPU the weights must be loaded already: the KV cache gets what is free of its utilization share.
        """
        check_batching(batching, batching_window_s)
        num_seqs, num_tokens = _batch_sizes(device, max_num_seqs, max_num_batched_tokens)
        block_size = block_size or BLOCK_SIZE
        kv_bytes = kv_cache_memory_bytes
        if kv_bytes is None:
            kv_bytes = _kv_memory_bytes(model_config, dtype, device, num_seqs, num_tokens, gpu_memory_utilization)
        block_bytes = bytes_per_block(model_config, block_size, dtype)
        num_blocks = kv_bytes // block_bytes
        longest = (num_blocks - 1) * block_size
        max_model_len = _model_len(model_config, max_model_len, longest, kv_bytes, block_bytes // block_size)
        useful_blocks = num_seqs * -(-max_model_len // block_size)
        return cls(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=min(num_blocks, 1 + useful_blocks),
            enable_prefix_caching=enable_prefix_caching,
            dtype=dtype,
            device=device,
            batching=batching,
            batching_window_s=batching_window_s,
            async_scheduling=device.type == "cuda" if async_scheduling is None else async_scheduling,
        )


def _batch_sizes(device: torch.device, num_seqs: int | None, num_tokens: int | None) -> tuple[int, int]:
    for name, value in (("max_num_seqs", num_seqs), ("max_num_batched_tokens", num_tokens)):
        if value is not None and value < 1:
            raise UsageError(f"engine.{name}: {value} is below 1")
    if num_seqs is None:
        num_seqs = min(DEFAULT_MAX_NUM_SEQS[device.type], num_tokens or DEFAULT_MAX_NUM_SEQS[device.type])
    if num_tokens is None:
        num_tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type], num_seqs)
    if num_tokens < num_seqs:
        raise UsageError(
            f"engine.max_num_batched_tokens: {num_tokens} is below engine.max_num_seqs {num_seqs}, and every running "
            f"sequence needs a token in every step; raise the first or lower the second"
        )
    return num_seqs, num_tokens


def _model_len(model_config: ModelConfig, asked: int | None, longest: int, kv_bytes: int, token_bytes: int) -> int:
    limit = model_config.max_position_embeddings
    if asked is not None and asked > limit:
        raise UsageError(f"engine.max_model_len: {asked} is above the model's {limit} positions; at most {limit}")
    needed = asked or 2
    if longest < needed:
        raise UsageError(
            f"engine.kv_cache_memory_bytes: {kv_bytes / _MIB:.1f} MiB hold {max(longest, 0)} tokens, and one sequence "
            f"of {needed} needs {needed * token_bytes / _MIB:.1f} MiB; lower engine.max_model_len or give more memory"
        )
    return asked or min(limit, longest)


def _kv_memory_bytes(
    model_config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    num_seqs: int,
    num_tokens: int,
    gpu_memory_utilization: float,
) -> int:
    if device.type == "cpu":
        return int(CPU_RAM_SHARE * available_ram_bytes())
    free, total = torch.cuda.mem_get_info(device)
    held_back = total * (1 - gpu_memory_utilization)
    return int(free - held_back) - _workspace_bytes(model_config, dtype, num_seqs, num_tokens)


def _workspace_bytes(model_config: ModelConfig, dtype: torch.dtype, num_seqs: int, num_tokens: int) -> int:
    """Activations of the widest step and a few copies of the logits."""
    heads = model_config.num_heads + 2 * model_config.num_kv_heads
    widths = 6 * model_config.hidden_size + 3 * model_config.intermediate_size + 3 * heads * model_config.head_dim
    return num_tokens * widths * dtype.itemsize + 5 * num_seqs * model_config.vocab_size * torch.float32.itemsize
