"""Sizes that fit, and refusals that name the key, the numbers and the fix."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from bulkrun.engine.config import MOST_EMPTY_BLOCKS, EngineConfig
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.engine.state_rows import KEPT_STATES
from bulkrun.errors import UsageError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import bytes_per_block
from bulkrun.models.recurrent_state import bytes_per_row
from bulkrun.settings import EngineArgs

CPU = torch.device("cpu")


@pytest.fixture
def model_config(model_dir) -> ModelConfig:
    return ModelConfig.from_dir(model_dir("llama"))


def _resolve(model_config: ModelConfig, **given: object) -> EngineConfig:
    return EngineConfig.resolve(model_config, torch.float32, CPU, EngineArgs(**given))


def test_defaults_use_the_models_length_and_no_more_memory_than_is_useful(model_config: ModelConfig) -> None:
    config = _resolve(model_config)
    assert config.max_model_len == model_config.max_position_embeddings
    assert config.num_blocks == 1 + config.max_num_seqs * config.max_blocks_per_seq
    assert config.max_num_batched_tokens >= config.max_num_seqs


def test_where_no_layer_attends_a_context_may_be_as_long_as_a_million_tokens(model_dir) -> None:
    mamba = ModelConfig.from_dir(model_dir("mamba"))
    assert _resolve(mamba).max_model_len == mamba.max_position_embeddings
    config = _resolve(mamba, max_model_len=2**20, kv_cache_memory_bytes=1, max_num_seqs=1)
    assert config.max_model_len == 2**20, "blocks hold nothing: any pool has room for them"
    with pytest.raises(UsageError, match=r"max_model_len: 1048577 is above the model's 1048576 positions"):
        _resolve(mamba, max_model_len=2**20 + 1)


def test_a_longer_context_than_the_default_is_there_for_those_who_ask(model_dir) -> None:
    raw = json.loads((model_dir("llama") / "config.json").read_text())
    stretched = ModelConfig.from_dict(raw | {"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    assert _resolve(stretched).max_model_len == 512
    assert _resolve(stretched, max_model_len=2048).max_model_len == 2048
    with pytest.raises(UsageError, match=r"max_model_len: 2049 is above the model's 2048 positions; at most 2048"):
        _resolve(stretched, max_model_len=2049)


def test_states_take_a_share_of_the_memory_and_what_is_asked_for_more(
    model_dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ModelConfig.from_dir(model_dir("qwen3_5"))
    row = bytes_per_row(model, torch.float32)
    assert row == 3 * 4 * (3 * 192 + 4 * 16 * 32)  # layers of float32; a convolution's inputs, heads' matrices
    free = 8 * row * (KEPT_STATES + 5)
    monkeypatch.setattr("bulkrun.engine.config.available_ram_bytes", lambda: free)
    config = _resolve(model)
    assert (config.max_num_seqs, config.num_kept_states, config.num_state_rows) == (5, KEPT_STATES, KEPT_STATES + 5)
    assert config.max_model_len == 512, "they leave as much for keys and values"
    assert _resolve(model, kv_cache_memory_bytes=2**20, max_num_seqs=9).max_num_seqs == 9
    for settings in ({"enable_prefix_caching": False}, {"batching": "static"}):
        assert _resolve(model, kv_cache_memory_bytes=2**20, **settings).num_kept_states == 0
    with pytest.raises(
        UsageError,
        match=r"max_num_seqs: 27 rows of states take 0\.8 MiB.* 0\.0 MiB are left.*lower engine\.max_num_seqs or",
    ):
        _resolve(model, max_num_seqs=19)


def test_of_a_gpu_states_take_a_share_of_what_it_may_give(model_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = ModelConfig.from_dir(model_dir("qwen3_5")), torch.device("cuda")
    total = 1000 * bytes_per_row(model, torch.float32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(0.7 * total), total))
    args = EngineArgs(gpu_memory_utilization=0.5, kv_cache_memory_bytes=2**20)
    config = EngineConfig.resolve(model, torch.float32, device, args)
    assert config.num_state_rows == 50, "a quarter of the 0.2 that weights leave of 0.5"


def test_nothing_is_left_for_keys_and_values_that_there_are_none_of(model_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    model, device = ModelConfig.from_dir(model_dir("mamba")), torch.device("cuda")
    free = 40 * bytes_per_row(model, torch.float32)
    monkeypatch.setattr("bulkrun.engine.config.available_ram_bytes", lambda: 4 * free)
    assert _resolve(model).num_state_rows == 40
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    args = EngineArgs(gpu_memory_utilization=1.0, kv_cache_memory_bytes=2**20)
    assert EngineConfig.resolve(model, torch.float32, device, args).num_state_rows == 30


@pytest.mark.parametrize(("block_size", "num_blocks"), [(None, MOST_EMPTY_BLOCKS), (1, 1 + 2**20)])
def test_blocks_that_hold_nothing_are_not_written_down_by_the_ten_million(
    model_dir, block_size: int | None, num_blocks: int
) -> None:
    model = ModelConfig.from_dir(model_dir("mamba"))
    assert _resolve(model).num_blocks == 1 + 128 * 512 // 16, "as many as all sequences can use"
    config = _resolve(model, max_model_len=2**20, max_num_seqs=1024, block_size=block_size)
    assert (config.max_model_len, config.num_blocks) == (2**20, num_blocks)


def test_memory_bounds_the_pool_and_then_the_length(model_config: ModelConfig) -> None:
    block = bytes_per_block(model_config, 16, torch.float32)
    config = _resolve(model_config, kv_cache_memory_bytes=10 * block + 3)
    assert config.num_blocks == 10
    assert config.max_model_len == 9 * 16


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_model_len": 513}, r"engine\.max_model_len: 513 is above the model's 512 positions"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, r"max_num_batched_tokens: 8 is below .*max_num_seqs 9"),
        ({"max_num_seqs": 0}, r"engine\.max_num_seqs: 0 is below 1"),
        (
            {"kv_cache_memory_bytes": 2**17, "max_model_len": 512},
            r"bytes: 131072 bytes hold \d+ tokens, and one sequence of 512 needs \d+ bytes \(33 blocks of 16 .*lower "
            r"engine\.max_model_len",
        ),
        ({"kv_cache_memory_bytes": 1}, r"one sequence of 2 needs \d+ bytes \(2 blocks .*lower engine\.block_size"),
    ],
)
def test_impossible_settings_name_key_numbers_and_fix(
    model_config: ModelConfig, given: dict[str, int], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        _resolve(model_config, **given)
    assert re.search(message, str(caught.value))


@pytest.mark.parametrize("given", [{"max_model_len": 512}, {"max_model_len": 100, "block_size": 1024}, {}])
def test_a_pool_of_the_bytes_that_a_refusal_names_is_enough(model_config: ModelConfig, given: dict[str, int]) -> None:
    with pytest.raises(UsageError) as caught:
        _resolve(model_config, kv_cache_memory_bytes=1, **given)
    needed = re.search(r"needs (\d+) bytes", str(caught.value))
    assert needed is not None
    _resolve(model_config, kv_cache_memory_bytes=int(needed[1]), **given)
    with pytest.raises(UsageError):
        _resolve(model_config, kv_cache_memory_bytes=int(needed[1]) - 1, **given)


def test_one_of_two_batch_sizes_pulls_the_other_along(model_config: ModelConfig) -> None:
    assert _resolve(model_config, max_num_batched_tokens=7).max_num_seqs == 7
    assert _resolve(model_config, max_num_seqs=5000).max_num_batched_tokens == 5000


def test_settings_reach_the_engine(model_dir) -> None:
    path: Path = model_dir("llama")
    engine = LLMEngine.from_model_dir(
        path,
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=3,
        max_model_len=77,
        block_size=8,
        kv_cache_memory_bytes=2**20,
    )
    assert (engine.max_num_seqs, engine.max_model_len, engine.config.block_size) == (3, 77, 8)
    assert engine.model_runner.kv_cache.k[0].dtype == torch.bfloat16
