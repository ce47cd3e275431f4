"""When memory runs out for a step: what that looks like, and going on with smaller sizes so that nothing is lost.

Knows sizes and errors; knows no requests. What the engine does with smaller sizes is its own business.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from bulkrun.engine.config import EngineConfig
from bulkrun.engine.memory import POOL_SHRINK, SizeLimits, Sizes, smaller
from bulkrun.engine.memory_errors import MEMORY_ERRORS, is_out_of_memory
from bulkrun.engine.step.model_runner import ModelRunner
from bulkrun.errors import ModelError, UsageError, first_line
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import bytes_per_block
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.recurrent_state import bytes_per_row

MAX_IN_A_ROW = 8  # by then the pool is a sixth of what it was: something else takes the memory
_GIB = 2**30
_Result = TypeVar("_Result")


def make_model_runner(model: LanguageModel, config: EngineConfig) -> tuple[ModelRunner, EngineConfig]:
    """The runner with its pool, and the config with the pool's size: less than there, where that does not fit.

    Raises UsageError, naming the keys, where nothing fits, or not the size that was asked for.
    """
    num_smaller = 0
    while True:
        try:
            return ModelRunner(model, config), config
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            shortage = first_line(error)
        if config.device.type == "cuda":
            torch.cuda.empty_cache()  # graphs, which have memory of their own, cannot use what a failed attempt leaves
        fewer = max(1 + config.max_blocks_per_seq, int(config.num_blocks * POOL_SHRINK))
        num_smaller += 1
        pool_bytes = config.num_blocks * _block_bytes(model.config, config)
        if _bytes_of_rows(config) > pool_bytes + _bytes_of_states(model.config, config):
            raise _rows_do_not_fit(config, shortage)
        if not pool_bytes:
            raise _states_do_not_fit(model.config, config, shortage)
        if config.is_pool_given or fewer >= config.num_blocks or num_smaller > MAX_IN_A_ROW:
            raise _pool_does_not_fit(model.config, config, shortage)
        logging.getLogger(__name__).warning(
            "out of memory; going on with %s (%s)", _as_pool(fewer * _block_bytes(model.config, config)), shortage
        )
        config = replace(config, num_blocks=fewer)


def _bytes_of_rows(config: EngineConfig) -> int:
    """Of the tokens and block tables of all sequences that may run at once."""
    return config.max_num_seqs * (config.max_model_len + config.max_blocks_per_seq) * torch.int32.itemsize


def _bytes_of_states(model_config: ModelConfig, config: EngineConfig) -> int:
    return config.num_state_rows * bytes_per_row(model_config, config.dtype)


def _rows_do_not_fit(config: EngineConfig, shortage: str) -> UsageError:
    return UsageError(
        f"engine.max_num_seqs: tokens and block tables of {config.max_num_seqs} sequences of up to "
        f"{config.max_model_len} tokens take {_bytes_of_rows(config) / _GIB:.2f} GiB, which do not fit ({shortage}); "
        "lower it or engine.max_model_len"
    )


def _states_do_not_fit(model_config: ModelConfig, config: EngineConfig, shortage: str) -> UsageError:
    state_bytes = _bytes_of_states(model_config, config)
    return UsageError(
        f"engine.max_num_seqs: {config.num_state_rows} rows of states, of {config.max_num_seqs} sequences and of "
        f"prefixes, take {state_bytes / _GIB:.2f} GiB, which do not fit ({shortage}); lower it"
    )


def _pool_does_not_fit(model_config: ModelConfig, config: EngineConfig, shortage: str) -> UsageError:
    pool = f"a KV pool of {config.num_blocks * _block_bytes(model_config, config) / _GIB:.2f} GiB"
    fix = "it, or engine.gpu_memory_utilization where it is not set"
    state_bytes = _bytes_of_states(model_config, config)
    if state_bytes:
        pool += f" beside {config.num_state_rows} rows of states of {state_bytes / _GIB:.2f} GiB"
        fix = f"engine.max_num_seqs, {config.max_num_seqs} now, or {fix}"
    return UsageError(f"engine.kv_cache_memory_bytes: {pool} does not fit ({shortage}); lower {fix}")


def _as_pool(num_bytes: int) -> str:
    return f"a KV pool of {num_bytes / _GIB:.2f} GiB; to begin with that, set engine.kv_cache_memory_bytes: {num_bytes}"


def _block_bytes(model_config: ModelConfig, config: EngineConfig) -> int:
    return bytes_per_block(model_config, config.block_size, config.kv_cache_dtype)


class MemoryGuard:
    """Says when memory ran out, and with which sizes to go on.

    `shortage` is what the allocator said, until `smaller` has an answer to it: a text and not the error, which through
    its frames would hold the tensors of the step.
    """

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        self._block_bytes = _block_bytes(model_config, config)
        self._token_bytes = _step_bytes_per_token(model_config, config.dtype)
        self._num_in_a_row = 0
        self.shortage: str | None = None

    def worked(self) -> None:
        """Note that a step succeeded."""
        self._num_in_a_row = 0

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """The result of `work`, None where memory ran out. Other errors are raised as they are."""
        try:
            return work()
        except MEMORY_ERRORS as error:
            if not is_out_of_memory(error):
                raise
            self.shortage = first_line(error)
            return None

    def smaller(self, config: EngineConfig) -> EngineConfig:
        """After a shortage: the same with a smaller pool, or smaller steps.

        The log says so, with the key that spares the next run this. Where nothing is left to give up, sizes stay as
        they are: what other processes hold comes and goes. Raises ModelError after too many times without a step in
        between.
        """
        shortage, self.shortage = self.shortage, None
        assert shortage is not None, "memory has not run out"
        self._num_in_a_row += 1
        if self._num_in_a_row > MAX_IN_A_ROW:
            raise ModelError(self._hopeless(config, shortage))
        sizes = Sizes(config.num_blocks, config.max_num_batched_tokens)
        limits = SizeLimits(1 + config.max_blocks_per_seq, config.max_num_seqs)
        step_bytes = sizes.max_num_batched_tokens * self._token_bytes
        found = smaller(sizes, limits, pool_bytes=sizes.num_blocks * self._block_bytes, step_bytes=step_bytes)
        if found != sizes:
            logging.getLogger(__name__).warning("%s", self._said(found, sizes, shortage))
        return replace(config, **found._asdict())

    def _said(self, found: Sizes, before: Sizes, shortage: str) -> str:
        if found.num_blocks < before.num_blocks:
            what = _as_pool(found.num_blocks * self._block_bytes)
        else:
            num_tokens = found.max_num_batched_tokens
            what = f"steps of {num_tokens} tokens; to begin with that, set engine.max_num_batched_tokens: {num_tokens}"
        return f"out of memory; nothing is lost, going on with {what} ({shortage})"

    def _hopeless(self, config: EngineConfig, shortage: str) -> str:
        return (
            f"out of memory, even with a KV pool of {config.num_blocks * self._block_bytes / _GIB:.2f} GiB and steps "
            f"of {config.max_num_batched_tokens} tokens; lower engine.max_num_seqs or engine.max_model_len, or free "
            f"what other processes hold ({shortage})"
        )


def _step_bytes_per_token(model_config: ModelConfig, dtype: torch.dtype) -> int:
    """Activations that live at one time, roughly: a few hidden states, gate and up projections, heads."""
    heads = model_config.num_heads + 2 * model_config.num_kv_heads
    widths = 6 * model_config.hidden_size + 3 * model_config.intermediate_size + 3 * heads * model_config.head_dim
    return widths * dtype.itemsize
