"""How large the KV pool may be: arithmetic over what was measured, and smaller sizes where even that was too much.

Pure: knows no device, no tensors and no requests. What is measured, and how, stands in `memory_probe`.
"""

from __future__ import annotations

from typing import NamedTuple

POOL_SHRINK = 0.8  # of the blocks that are there: what one step lacks is rarely more than a fifth of the pool
_GIB = 2**30


class DeviceMemory(NamedTuple):
    """A device with the weights loaded, in bytes."""

    total_bytes: int
    free_bytes: int  # used by no process, after torch gave its cached blocks back
    step_bytes: int  # taken at most, beyond the weights, by the widest step: activations, logits, sampling, rows
    reserved_bytes: int = 0  # for what is yet to come, such as memory that captured graphs will keep

    def kv_bytes(self, utilization: float) -> int:
        """What a KV pool may take, so that everything on the device stays within `utilization` of it.

        Others' memory counts as used. Negative where not even the weights and one step fit.
        """
        used_bytes = self.total_bytes - self.free_bytes
        return int(self.total_bytes * utilization) - used_bytes - self.step_bytes - self.reserved_bytes

    def explain(self, utilization: float) -> str:
        """`kv_bytes` in words, as the beginning of a sentence about what fits."""
        return (
            f"engine.gpu_memory_utilization: {utilization:g} of {_gib(self.total_bytes)}, without "
            f"{_gib(self.total_bytes - self.free_bytes)} in use with the weights and "
            f"{_gib(self.step_bytes + self.reserved_bytes)} for the widest step (engine.max_num_batched_tokens, "
            f"engine.max_num_seqs), leaves {_gib(max(0, self.kv_bytes(utilization)))}, which"
        )


class Sizes(NamedTuple):
    """What an engine can give up when memory is short."""

    num_blocks: int  # the null block included
    max_num_batched_tokens: int


class SizeLimits(NamedTuple):
    """The minimum: one sequence of `max_model_len` always fits, and every sequence gets a token per step."""

    num_blocks: int
    max_num_batched_tokens: int


def smaller(sizes: Sizes, limits: SizeLimits, *, pool_bytes: int, step_bytes: int) -> Sizes:
    """The sizes to go on with after memory ran out: the same ones where nothing is left to give up.

    `pool_bytes` and `step_bytes` are what the pool and the activations of the widest step take now: the larger one
    gives way, for a fifth of a small pool would not make room for a large step. A pool that takes nothing stays.
    """
    num_blocks = max(limits.num_blocks, int(sizes.num_blocks * POOL_SHRINK)) if pool_bytes else sizes.num_blocks
    num_tokens = max(limits.max_num_batched_tokens, sizes.max_num_batched_tokens // 2)
    if num_blocks < sizes.num_blocks and (pool_bytes >= step_bytes or num_tokens == sizes.max_num_batched_tokens):
        return sizes._replace(num_blocks=num_blocks)
    return sizes._replace(max_num_batched_tokens=num_tokens)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB"
