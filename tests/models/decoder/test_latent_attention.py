"""Latent attention: what files say of it, what is kept of a token, and any sizes beside transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.errors import ModelError
from bulkrun.models.config.experts import ExpertGroups
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.kv_cache import KVCache, bytes_per_block
from tests.models.decoder.test_decoder import load, random_tokens, transformers_logits, whole_prompt_logits
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits, tolerance_of
from tests.models.tiny_models import SMALL, save_published, save_tiny_model

YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
OF_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1}


def read(architecture: str, **keys: Any) -> DecoderConfig:
    config = ModelConfig.from_dict({**SMALL, "architectures": [architecture], **keys})
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("deepseek_v3", {**OF_V3, "first_k_dense_replace": 2, "norm_topk_prob": False, "rope_theta": 5e4}),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_interleave": False}),
        ("moonlight", {**OF_V3, "model_type": "deepseek_v3", "routed_scaling_factor": 2.446}),
        ("deepseek_v2", {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 16.0}),
        ("deepseek_v2_lite", {"rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "n_group": 1}),
        ("glm4_moe_lite", {"mlp_layer_types": ["sparse", "dense", "sparse"], "partial_rotary_factor": 1.0}),
        ("glm4_moe_lite", {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "rope_theta": 1e6}),
        ("minicpm3", {"scale_emb": 5, "scale_depth": 0.7, "dim_model_base": 12, "tie_word_embeddings": True}),
        ("minicpm3", {"scale_depth": None, "dim_model_base": None, "v_head_dim": None, "mlp_bias": True}),
        (
            "minicpm3",
            {
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0, 1.1, 1.3, 2.0],
                    "long_factor": [1.0, 2.0, 4.0, 8.0],
                    "original_max_position_embeddings": 512,
                }
            },
        ),
        ("youtu", {"rope_interleave": False, "rope_theta": 1.6e6, "q_lora_rank": None}),
    ],
)
def test_published_keys_mean_what_they_mean_to_transformers(variant: str, keys: dict[str, Any], tmp_path: Path) -> None:
    reference = save_published(tmp_path, variant, **keys)
    tokens = random_tokens(60, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance_of(variant), rtol=0)


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
    """Its steps are wide enough for threads to have rows of their own."""
    keys, lens = drawn_keys(seed), [300, 41]
    model, sequences = load(tmp_path, "youtu", **keys), [random_tokens(length, seed) for length in lens]
    for tokens, ours in zip(sequences, forced_logits(model, sequences, [290, 20]), strict=True):
        theirs = transformers_logits("youtu", tokens, **keys)
        torch.testing.assert_close(ours, theirs, atol=tolerance_of("youtu"), rtol=0)


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


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, r"attention_bias true is not supported with latent"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim 7 is not supported; it must be even"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, r"'kv_lora_rank' is 0, not a whole number above 0"),
        ("DeepseekV3ForCausalLM", {"v_head_dim": "x"}, r"'v_head_dim' is 'x', not a whole number above 0"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, r"scoring_func 'softmax' is not supported; sigmoid is"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, r"moe_layer_freq 2 is not supported; 1 is"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, r"'n_group' is 7 with topk_group 4, .* does not go together"),
        ("DeepseekV3ForCausalLM", {"topk_group": 9}, r"'n_group' is 8 with topk_group 9, .* does not go together"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, r"norm_topk_prob true is not supported; false is"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, r"topk_method 'noaux_tc' is not supported; greedy and"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, r"'n_group' is 3 with topk_group 1, .* does not go together"),
        ("MiniCPM3ForCausalLM", {"dim_model_base": 0}, r"'dim_model_base' is 0, not a number above 0"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, r"'mlp_layer_types' has 1 values for 3 layers"),
        ("YoutuForCausalLM", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported; 1.0 is"),
    ],
)
def test_what_is_not_supported_is_said(architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(architecture, **keys)
