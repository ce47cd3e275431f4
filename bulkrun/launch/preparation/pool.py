"""A KV pool that the job file asks for, held against its model before anything is loaded. Torch-free."""

from __future__ import annotations

from bulkrun.errors import UsageError
from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.settings import DEFAULT_BLOCK_SIZE, MIN_MODEL_LEN

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


def refuse_small_pool(engine: EngineSpec, model: ModelConfig) -> None:
    """Raise UsageError where one sequence finds no room, in whatever dtype the device makes of `auto`.

    What the engine says of it, which knows the device, is more exact; this is what can be said without.
    """
    if engine.kv_cache_memory_bytes is None:
        return
    block_size, needed = engine.block_size or DEFAULT_BLOCK_SIZE, engine.max_model_len or MIN_MODEL_LEN
    dtype = engine.dtype if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype
    itemsize = ITEMSIZE.get(dtype, min(2, ITEMSIZE[model.dtype]))
    num_blocks = 1 + -(-needed // block_size)
    least_bytes = num_blocks * block_size * model.kv_size * itemsize
    if engine.kv_cache_memory_bytes < least_bytes:
        raise UsageError(
            f"engine.kv_cache_memory_bytes: {engine.kv_cache_memory_bytes} bytes do not hold one sequence of {needed} "
            f"tokens, which needs at least {least_bytes} ({num_blocks} blocks of {block_size} tokens, one of them "
            "always empty); give more, or lower engine.max_model_len or engine.block_size"
        )
