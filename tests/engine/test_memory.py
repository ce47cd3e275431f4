"""The arithmetic of the pool: what is left is used, what is not there is not, and shrinking ends where it must."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.engine.config import MIN_BLOCKS, EngineConfig
from bulkrun.engine.memory import DeviceMemory, SizeLimits, Sizes, smaller
from bulkrun.errors import UsageError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import bytes_per_block
from bulkrun.settings import EngineArgs

GIB = 2**30
CUDA = torch.device("cuda")


@pytest.fixture
def model_config(model_dir) -> ModelConfig:
    return ModelConfig.from_dir(model_dir("llama"))


def test_the_pool_gets_what_weights_step_others_and_reserve_leave_of_the_share() -> None:
    memory = DeviceMemory(total_bytes=100 * GIB, free_bytes=70 * GIB, step_bytes=5 * GIB, reserved_bytes=2 * GIB)
    assert memory.kv_bytes(0.9) == (90 - 30 - 5 - 2) * GIB
    assert memory.kv_bytes(0.3) < 0


@given(total=st.integers(1, 200 * GIB), share=st.floats(0.01, 1.0), data=st.data())
def test_pool_step_and_what_is_used_never_exceed_the_share(total: int, share: float, data: st.DataObject) -> None:
    free = data.draw(st.integers(0, total))
    memory = DeviceMemory(total, free, data.draw(st.integers(0, free)), data.draw(st.integers(0, free)))
    in_use = total - free + memory.step_bytes + memory.reserved_bytes
    assert memory.kv_bytes(share) + in_use <= total * share
    assert memory.kv_bytes(share) + in_use > total * share - 1


def test_a_gpus_pool_is_measured_with_every_other_size_settled(model_config: ModelConfig) -> None:
    asked: list[EngineConfig] = []
    block_bytes = bytes_per_block(model_config, 16, torch.bfloat16)

    def measure(config: EngineConfig) -> DeviceMemory:
        asked.append(config)
        return DeviceMemory(total_bytes=1000 * block_bytes, free_bytes=400 * block_bytes, step_bytes=80 * block_bytes)

    config = EngineConfig.resolve(model_config, torch.bfloat16, CUDA, EngineArgs(max_model_len=64), measure=measure)
    assert config.num_blocks == 900 - 600 - 80
    (draft,) = asked
    assert draft.num_blocks == MIN_BLOCKS
    assert (draft.max_num_seqs, draft.max_num_batched_tokens) == (config.max_num_seqs, config.max_num_batched_tokens)
    assert draft.max_model_len == config.max_model_len == 64


def test_a_pool_of_a_given_size_is_not_measured(model_config: ModelConfig) -> None:
    config = EngineConfig.resolve(model_config, torch.bfloat16, CUDA, EngineArgs(kv_cache_memory_bytes=2**20))
    assert config.num_blocks == 2**20 // bytes_per_block(model_config, 16, torch.bfloat16)


def test_a_gpu_without_room_is_refused_with_what_takes_it_and_the_keys(model_config: ModelConfig) -> None:
    memory = DeviceMemory(total_bytes=8 * GIB, free_bytes=3 * GIB, step_bytes=2 * GIB + 2**29)
    with pytest.raises(UsageError) as caught:
        EngineConfig.resolve(model_config, torch.bfloat16, CUDA, EngineArgs(), measure=lambda _: memory)
    assert re.search(
        r"gpu_memory_utilization: 0\.9 of 8\.00 GiB, without 5\.00 GiB in use .* and 2\.50 GiB for the widest step "
        r"\(engine\.max_num_batched_tokens, .*leaves 0\.00 GiB, which hold 0 tokens, .*lower engine\.max_model_len",
        str(caught.value),
    )


def test_the_larger_of_pool_and_step_gives_way() -> None:
    sizes, limits = Sizes(1000, 8192), SizeLimits(33, 256)
    assert smaller(sizes, limits, pool_bytes=9, step_bytes=1) == Sizes(800, 8192)
    assert smaller(sizes, limits, pool_bytes=1, step_bytes=9) == Sizes(1000, 4096)
    assert smaller(Sizes(33, 8192), limits, pool_bytes=9, step_bytes=1) == Sizes(33, 4096)
    assert smaller(Sizes(1000, 256), limits, pool_bytes=1, step_bytes=9) == Sizes(800, 256)


@given(
    blocks=st.integers(2, 10**6),
    tokens=st.integers(1, 10**5),
    min_blocks=st.integers(2, 10**6),
    min_tokens=st.integers(1, 10**5),
    pool_share=st.floats(0, 1),
)
def test_shrinking_never_passes_its_limits_and_ends(
    blocks: int, tokens: int, min_blocks: int, min_tokens: int, pool_share: float
) -> None:
    sizes, limits = Sizes(max(blocks, min_blocks), max(tokens, min_tokens)), SizeLimits(min_blocks, min_tokens)
    for _ in range(200):
        found = smaller(sizes, limits, pool_bytes=sizes.num_blocks, step_bytes=int(pool_share * 10**6))
        if found == sizes:
            break
        assert limits.num_blocks <= found.num_blocks <= sizes.num_blocks
        assert limits.max_num_batched_tokens <= found.max_num_batched_tokens <= sizes.max_num_batched_tokens
        sizes = found
    assert sizes == Sizes(min_blocks, min_tokens)
