"""Latent attention: what is kept of a token, what holds where files say nothing, and any sizes beside transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.models.config.experts import ExpertGroups
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.kv_cache import KVCache, bytes_per_block
from tests.models.decoder.test_decoder import check_wide_steps
from tests.models.decoder.test_family_files import read
from tests.models.tiny_models import save_tiny_model


def drawn_keys(seed: int) -> dict[str, Any]:
    """Sizes that fill words and panels or not, with and without a bottleneck of queries, one head and many."""
    draw = random.Random(seed)
    is_whole, num_heads = draw.random() < 0.5, draw.choice((1, 2, 4, 16))
    return {
        "hidden_size": 64 if is_whole else 48,
        "intermediate_size": 96 if is_whole else 72,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "kv_lora_rank": draw.choice((32, 64) if is_whole else (8, 20, 34)),
        "q_lora_rank": draw.choice((None, 32, 64) if is_whole else (None, 24, 7)),
        "qk_nope_head_dim": draw.choice((32, 64) if is_whole else (4, 10, 34)),
        "qk_rope_head_dim": draw.choice((16, 32) if is_whole else (2, 6, 8)),
        "v_head_dim": draw.choice((32, 64) if is_whole else (5, 12, 33)),
        "rope_interleave": draw.random() < 0.5,
        "tie_word_embeddings": draw.random() < 0.5,
    }


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("seed", range(10))
def test_any_sizes_have_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    check_wide_steps(tmp_path, "youtu", seed, drawn_keys(seed))


def test_a_token_is_kept_as_one_row_for_all_heads(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save_tiny_model(tmp_path, "deepseek_v3"))
    cache = KVCache.allocate(config, 5, 4, torch.bfloat16, "cpu")
    assert [keys.shape for keys in cache.k] == [(5, 4, 1, 24)] * 3
    assert [values.shape for values in cache.v] == [(5, 4, 1, 16)] * 3
    cache.k[1][2, 3, 0, 8:] = 7.0
    assert (cache.v[1][2, 3] == 7.0).all(), "values are the last dimensions of keys"
    cache.clear_blocks(torch.tensor([2]))
    assert not cache.k[1].any()
    assert bytes_per_block(config, 4, torch.bfloat16) == 4 * 3 * 24 * 2


def test_what_a_file_does_not_say_is_that_of_the_largest_model() -> None:
    moe = read("DeepseekV3ForCausalLM").moe
    assert moe is not None and moe.groups == ExpertGroups(8, 4, 2)
    assert (moe.num_experts, moe.shared_size, moe.sparse_layers) == (256, 2048, (False,) * 3)
    assert read("DeepseekV2ForCausalLM", topk_method="greedy", n_group=8).moe.groups is None
