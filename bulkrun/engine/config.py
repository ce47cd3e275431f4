"""Every size of the engine, worked out once: from what was asked for, the model, and the memory that is there.

Knows memory and the model's shape. Knows no requests. A value that cannot work is refused here, by name and with
the fix, so that nothing later has to doubt a size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from bulkrun.engine.memory import DeviceMemory
from bulkrun.engine.scheduling.batching import BatchingPolicy, batching_policy, check_batching
from bulkrun.engine.state_rows import most_sequences, num_kept_states
from bulkrun.errors import UsageError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.host_memory import available_ram_bytes
from bulkrun.models.kv_cache import bytes_per_block
from bulkrun.models.loading.quantization import refuse_without_fp8
from bulkrun.models.recurrent_state import bytes_per_row
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.settings import (
    DEFAULT_BLOCK_SIZE,
    DEFAULT_MAX_NUM_BATCHED_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    MIN_MODEL_LEN,
    Batching,
    EngineArgs,
)

MIN_BLOCKS = 2  # the null block and one to use
# Where no layer attends blocks hold nothing and bound nothing, but each is written down in some 150 bytes.
MOST_EMPTY_BLOCKS = 2**20
CPU_RAM_SHARE = 0.25  # of the RAM that is available; the rest is the job's and the other processes'
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
    kv_cache_dtype: torch.dtype
    device: torch.device
    batching: Batching
    batching_window_s: float
    async_scheduling: bool
    enforce_eager: bool
    is_pool_given: bool  # the user gave its size: no other will do
    num_kept_states: int | None = None  # of prefixes, where sequences of the model have states; None: they have none

    @property
    def max_blocks_per_seq(self) -> int:
        """Blocks of a sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_state_rows(self) -> int:
        """Rows of states: one for each sequence, and those that are kept of prefixes."""
        return self.max_num_seqs + (self.num_kept_states or 0)

    def batching_policy(self, clock: Callable[[], float]) -> BatchingPolicy:
        """A policy that has let nobody in yet."""
        return batching_policy(self.batching, self.max_num_seqs, self.batching_window_s, clock)

    @classmethod
    def resolve(
        cls,
        model_config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        args: EngineArgs,
        *,
        measure: Callable[[EngineConfig], DeviceMemory] | None = None,
    ) -> EngineConfig:
        """Fill in what was not given. Raises UsageError, naming key and fix, for what cannot work.

        On a GPU the KV cache gets what weights and the widest step leave of the utilization share: `measure` finds that
        out, given all sizes but the pool's. On a CPU it gets a share of the RAM that is available.
        """
        draft = _draft(model_config, dtype, device, args)
        pool_bytes, explanation = args.kv_cache_memory_bytes, None
        if pool_bytes is None and device.type == "cpu":
            pool_bytes, explanation = _beside_states(draft, _usable_bytes(device, 1.0), model_config)
        if pool_bytes is None:
            assert measure is not None, "what a GPU has free is found out by running a step on it"
            memory, share = measure(draft), args.gpu_memory_utilization
            pool_bytes, explanation = memory.kv_bytes(share), memory.explain(share)
        block_bytes = bytes_per_block(model_config, draft.block_size, draft.kv_cache_dtype)
        return _with_pool(draft, max(pool_bytes, 0), block_bytes, args.max_model_len or MIN_MODEL_LEN, explanation)


def _draft(model_config: ModelConfig, dtype: torch.dtype, device: torch.device, args: EngineArgs) -> EngineConfig:
    """All sizes but the pool's, which is the smallest there can be."""
    check_batching(args.batching, args.batching_window_s)
    refuse_empty_steps(args)
    num_kept = num_kept_states(model_config, dtype, args)
    usable_bytes = partial(_usable_bytes, device, args.gpu_memory_utilization)
    default = DEFAULT_MAX_NUM_SEQS[device.type]
    most = most_sequences(model_config, dtype, device, usable_bytes=usable_bytes, num_kept=num_kept, default=default)
    num_seqs, num_tokens = _batch_sizes(device, most, args.max_num_seqs, args.max_num_batched_tokens)
    return EngineConfig(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_tokens,
        max_model_len=model_config.model_len(args.max_model_len),
        block_size=args.block_size or DEFAULT_BLOCK_SIZE,
        num_blocks=MIN_BLOCKS,
        num_kept_states=num_kept,
        enable_prefix_caching=args.enable_prefix_caching,
        dtype=dtype,
        kv_cache_dtype=_kv_dtype(args.kv_cache_dtype, dtype, device),
        device=device,
        batching=args.batching,
        batching_window_s=args.batching_window_s,
        async_scheduling=schedules_ahead(args, device),
        enforce_eager=args.enforce_eager,
        is_pool_given=args.kv_cache_memory_bytes is not None,
    )


def _usable_bytes(device: torch.device, gpu_share: float) -> int:
    """What an engine may take beside the weights, which are there: of a CPU's RAM, or up to a share of a GPU."""
    if device.type == "cpu":
        return int(CPU_RAM_SHARE * available_ram_bytes())
    torch.cuda.empty_cache()  # of the engine with another adapter that was here before
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return max(0, free_bytes - int((1 - gpu_share) * total_bytes))


def refuse_empty_steps(args: EngineArgs) -> None:
    """Raise UsageError for steps that could hold nothing."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UsageError(f"engine.{name}: {value} is below 1; give at least 1, or leave the key out")


def schedules_ahead(args: EngineArgs, device: torch.device) -> bool:
    """Whether the next step is launched before the last one's results are known: by default where there is a GPU."""
    return device.type == "cuda" if args.async_scheduling is None else args.async_scheduling


def _batch_sizes(device: torch.device, most: int, num_seqs: int | None, num_tokens: int | None) -> tuple[int, int]:
    if num_seqs is None:
        num_seqs = min(most, num_tokens or most)
    if num_tokens is None:
        num_tokens = max(DEFAULT_MAX_NUM_BATCHED_TOKENS[device.type], num_seqs)
    if num_tokens < num_seqs:
        raise UsageError(
            f"engine.max_num_batched_tokens: {num_tokens} is below engine.max_num_seqs {num_seqs}, and every running "
            f"sequence needs a token in every step; raise the first or lower the second"
        )
    return num_seqs, num_tokens


def _kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """auto: the model's dtype."""
    if name == "fp8":
        refuse_without_fp8(device, "engine.kv_cache_dtype")
        return FP8
    kv_dtype: torch.dtype = dtype if name == "auto" else getattr(torch, name)
    return kv_dtype


def _with_pool(
    draft: EngineConfig, pool_bytes: int, block_bytes: int, needed: int, explanation: str | None
) -> EngineConfig:
    """The sizes that so many bytes of KV cache allow, no more than all sequences can use.

    Raises UsageError where a sequence of `needed` tokens finds no room.
    """
    empty = max(MOST_EMPTY_BLOCKS, 1 + draft.max_blocks_per_seq)
    num_blocks = pool_bytes // block_bytes if block_bytes else empty
    longest = max(num_blocks - 1, 0) * draft.block_size
    if longest < needed:
        where = explanation or f"engine.kv_cache_memory_bytes: {pool_bytes} bytes"
        raise _too_small(where, longest, needed, block_bytes, draft)
    sized = replace(draft, max_model_len=min(draft.max_model_len, longest))
    useful_blocks = sized.max_num_seqs * sized.max_blocks_per_seq
    return replace(sized, num_blocks=min(num_blocks, 1 + useful_blocks))


def _beside_states(draft: EngineConfig, share_bytes: int, model_config: ModelConfig) -> tuple[int, str | None]:
    """What the states of a CPU's sequences leave for keys and values, and, of a model that has some, why it is so."""
    state_bytes = draft.num_state_rows * bytes_per_row(model_config, draft.dtype)
    left_bytes = share_bytes - state_bytes
    if not state_bytes:
        return left_bytes, None
    return left_bytes, (
        f"engine.max_num_seqs: {draft.num_state_rows} rows of states take {state_bytes / _MIB:.1f} MiB, and of the "
        f"{share_bytes / _MIB:.1f} MiB for them and the KV pool {max(0, left_bytes) / _MIB:.1f} MiB are left, which"
    )


def _too_small(where: str, longest: int, needed: int, block_bytes: int, draft: EngineConfig) -> UsageError:
    num_blocks = 1 + -(-needed // draft.block_size)
    keys = "engine.block_size" if draft.is_pool_given and needed == MIN_MODEL_LEN else "engine.max_model_len"
    keys = keys if draft.num_kept_states is None else f"engine.max_num_seqs or {keys}"
    return UsageError(
        f"{where} hold {longest} tokens, and one sequence of {needed} needs {num_blocks * block_bytes} bytes "
        f"({num_blocks} blocks of {draft.block_size} tokens, one of them always empty); "
        f"lower {keys} or give more memory"
    )
