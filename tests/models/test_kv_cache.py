"""The pool's tensors: zeros, in memory only where somebody wrote, and a clear that reaches every layer."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from bulkrun.models import kv_cache
from bulkrun.models.config.layer_kv import LayerKV
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import KVCache, bytes_per_block
from bulkrun.ops.dispatch import uses_compiled
from tests.models.tiny_models import save_tiny_model

BLOCK_SIZE = 16


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_dir(save_tiny_model(tmp_path, "llama"))


def _anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_blocks_are_zeros_that_can_be_written(config: ModelConfig, dtype: torch.dtype) -> None:
    cache = KVCache.allocate(config, 5, BLOCK_SIZE, dtype, "cpu")
    shape = (5, BLOCK_SIZE, config.num_kv_heads, config.head_dim)
    assert len(cache.k) == len(cache.v) == config.num_layers
    assert all(tensor.shape == shape and tensor.dtype == dtype for tensor in (*cache.k, *cache.v))
    assert not any(tensor.float().any() for tensor in (*cache.k, *cache.v))
    cache.k[1][3].view(torch.uint8).fill_(64)
    assert cache.k[1][3].float().ne(0).all() and not cache.k[1][4].float().any() and not cache.v[1].float().any()
    cache.clear_blocks(torch.tensor([3]))
    assert not cache.k[1].float().any()


def test_a_pool_on_a_cpu_takes_memory_as_it_is_used(config: ModelConfig) -> None:
    num_blocks = 2**29 // bytes_per_block(config, BLOCK_SIZE, torch.float32)
    before = _anonymous_bytes()
    cache = KVCache.allocate(config, num_blocks, BLOCK_SIZE, torch.float32, "cpu")
    assert _anonymous_bytes() - before < 2**26
    for tensor in (*cache.k, *cache.v):
        tensor[num_blocks // 2 :].fill_(1.0)
    assert 2**27 < _anonymous_bytes() - before < 2**29
    del cache, tensor
    assert _anonymous_bytes() - before < 2**26


def test_a_pool_beyond_all_memory_says_so(config: ModelConfig) -> None:
    num_blocks = 2**46 // bytes_per_block(config, BLOCK_SIZE, torch.float32)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        KVCache.allocate(config, num_blocks, BLOCK_SIZE, torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_touched_blocks_have_memory_and_keep_what_they_hold(config: ModelConfig, dtype: torch.dtype) -> None:
    block_bytes = bytes_per_block(config, BLOCK_SIZE, dtype)
    num_blocks = 2**28 // block_bytes
    cache = KVCache.allocate(config, num_blocks, BLOCK_SIZE, dtype, "cpu")
    if not uses_compiled(cache.k[0]):
        pytest.skip("no compiled ops on this machine: a step's writes find memory")
    cache.v[1][3].view(torch.uint8).fill_(64)
    before = _anonymous_bytes()
    cache.touch(num_blocks // 2 - 1)
    assert num_blocks // 2 <= cache.num_touched_blocks < num_blocks // 2 + 64
    grown = _anonymous_bytes() - before
    assert abs(grown - cache.num_touched_blocks * block_bytes) < 2**24
    cache.touch(num_blocks // 4)
    assert _anonymous_bytes() - before < grown + 2**20
    cache.touch(num_blocks)
    assert cache.num_touched_blocks == num_blocks
    assert cache.v[1][3].view(torch.uint8).eq(64).all() and not cache.v[1][4].view(torch.uint8).any()
    assert not cache.k[0].view(torch.uint8).any()


def test_layers_of_other_sizes_are_touched_apart_and_shared_ones_once(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlike = dataclasses.replace(config, unlike_layers=(LayerKV(2, 64, 0), LayerKV(1, 8, 1), LayerKV(2, 64, 0)))
    cache = KVCache.allocate(unlike, 300, BLOCK_SIZE, torch.float32, "cpu")
    if not uses_compiled(cache.k[0]):
        pytest.skip("no compiled ops on this machine: a step's writes find memory")
    touched: list[list[int]] = []
    monkeypatch.setattr(
        kv_cache, "touch_pages", lambda tensors, first, end: touched.append([tensor.data_ptr() for tensor in tensors])
    )
    cache.touch(100)
    assert touched == [[one.data_ptr() for one in (cache.k[layer], cache.v[layer])] for layer in (0, 1)]
