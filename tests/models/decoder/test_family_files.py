"""config.json of families with words of their own: what it means here is what it means to transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.rotary_frequencies import query_growth
from tests.models.decoder.test_decoder import random_tokens, whole_prompt_logits
from tests.models.load import load_model
from tests.models.paged_driver import tolerance_of
from tests.models.tiny_models import SMALL, save_published

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
OF_V3 = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1, "num_nextn_predict_layers": 1}


def read(architecture: str, **keys: Any) -> DecoderConfig:
    config = ModelConfig.from_dict({**SMALL, "architectures": [architecture], **keys})
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("ernie4_5", {"use_bias": True, "rope_theta": 5e4}),
        ("glm4", {"partial_rotary_factor": 0.25, "rope_theta": 5e4}),
        ("glm", {"attention_bias": False, "partial_rotary_factor": 1.0}),
        ("seed_oss", {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True}),
        ("arcee", {"mlp_bias": True, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("exaone4", {"layer_types": [FULL, SLIDING, SLIDING], "sliding_window_pattern": "LG"}),
        (
            "hunyuan",
            {
                "rope_theta": 3e3,
                "attention_bias": True,
                "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0, "mscale_all_dim": 0.0},
            },
        ),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": 3, "factor": 1.0, "rope_theta": 7e3}}),
        # norms behind RoPE undo what yarn multiplies heads by
        ("hunyuan", {"rope_scaling": YARN}),
        ("hunyuan_moe", {"rope_scaling": YARN | {"alpha": 50.0}}),  # which is of dynamic RoPE
        ("nanochat", {"rope_scaling": YARN}),
        ("llama4", {"rope_scaling": YARN}),
        ("llama4_maverick", {"rope_scaling": YARN}),  # has no such norms
        ("olmoe", {"norm_topk_prob": True, "attention_bias": True}),
        ("glm4_moe", {"first_k_dense_replace": 2, "norm_topk_prob": False, "num_nextn_predict_layers": 1}),
        ("glm4_moe", {"n_group": 4, "topk_group": 2}),
        ("ernie4_5_moe_between", {"moe_layer_interval": 3}),
        ("deepseek_v3", {"n_group": 2, "topk_group": 2, "num_experts_per_tok": 8}),  # all experts of all groups
        ("deepseek_v2_lite", {"mlp_bias": True}),
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
        ("apertus", {"attention_bias": True, "num_key_value_heads": 3, "rope_theta": 5e4}),
        (
            "kimi_linear",  # as published
            {
                "linear_attn_config": {
                    "full_attn_layers": [2, 4],
                    "kda_layers": [1, 3],
                    "head_dim": 24,
                    "num_heads": 2,
                    "short_conv_kernel_size": 3,
                },
                "layer_types": None,
                "num_experts": 6,
                "num_experts_per_token": 2,
                "num_shared_experts": 2,
                "moe_renormalize": False,
                "num_expert_group": 2,
                "topk_group": 1,
                "first_k_dense_replace": 2,
                "model_max_length": 400,
                "mla_use_nope": True,
                "moe_layer_freq": 1,
                "moe_router_activation_func": "sigmoid",
                "rope_theta": 1e4,
            },
        ),
        ("kimi_linear", {"layer_types": None, "num_hidden_layers": 6, "mlp_layer_types": ["dense", *["sparse"] * 5]}),
        ("ministral", {"layer_types": [FULL, SLIDING, FULL]}),
        ("cohere", {"logit_scale": 0.2, "attention_bias": True, "tie_word_embeddings": True, "layer_norm_eps": 1e-3}),
        ("cohere", {"use_qk_norm": True, "num_key_value_heads": 3, "rope_theta": 8e6}),
        ("cohere2", {"sliding_window_pattern": 3, "attention_bias": True}),
        ("cohere2", {"layer_types": [FULL, SLIDING, SLIDING], "rope_theta": 5e4}),
        # as published: EleutherAI/pythia-160m, gpt-neox-20b, others without a key that transformers 5 writes
        ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 5e3, "rope_parameters": None, "hidden_act": "gelu"}),
        ("gpt_neox", {"use_parallel_residual": False, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-3}),
        ("gpt_neox", {"attention_bias": False, "tie_word_embeddings": True, "rotary_pct": 1.0}),
        ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "rope_theta": 5e4}),
        ("falcon", {"ffn_hidden_size": None, "layer_norm_epsilon": 1e-3, "tie_word_embeddings": False}),
        ("falcon_new", {"num_ln_in_parallel_attn": 1, "num_kv_heads": 6, "bias": False}),
        ("falcon_new", {"activation": "gelu_new", "num_kv_heads": 1}),
        ("falcon_new", {"multi_query": True, "n_embed": 48, "hidden_size": 96}),  # the first as Falcon 40B has it
        ("gptj", {"n_inner": None, "layer_norm_epsilon": 1e-3, "rotary_dim": 8, "n_positions": 300}),
        ("gptj", {"rope_theta": 777.0, "rope_scaling": {"type": "linear", "factor": 2.0}}),  # keys of others
        (
            "codegen",
            {"n_inner": None, "activation_function": "gelu", "tie_word_embeddings": False, "rms_norm_eps": 0.5},
        ),
        ("jais2", {"attention_bias": False, "mlp_bias": False, "rope_theta": 5e5, "layer_norm_eps": 1e-3}),
        ("jais2", {"layer_norm_eps": 1e-3, "rms_norm_eps": 0.5}),  # a key that none with such norms has
        ("nemotron", {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 1.0, "norm_eps": 1e-3}),
        ("nanochat", {"attention_bias": True, "final_logit_softcapping": None, "rms_norm_eps": 1e-3}),
        ("olmo", {"attention_bias": True, "num_key_value_heads": 6, "tie_word_embeddings": True}),
        ("olmo", {"rms_norm_eps": 1e-2, "rope_scaling": YARN}),
        ("phi", {"tie_word_embeddings": True}),
        ("phi", {"partial_rotary_factor": 0.25, "hidden_act": "gelu", "layer_norm_eps": 1e-3}),
        ("stablelm", {"rope_parameters": None, "partial_rotary_factor": 1.0, "use_qkv_bias": True}),
        ("stablelm_beside", {"qk_layernorm": False, "tie_word_embeddings": True, "layer_norm_eps": 1e-3}),
        ("starcoder2", {"use_bias": False, "sliding_window": None, "norm_epsilon": 1e-3, "rope_theta": 1e6}),
        (
            "cohere2_moe",
            {
                "layer_types": None,
                "mlp_layer_types": None,
                "first_k_dense_replace": 2,
                "sliding_window_pattern": 2,
                "num_hidden_layers": 5,
                "expert_selection_fn": "sigmoid",
                "shared_expert_combination_strategy": "sum",
                "norm_topk_prob": False,
            },
        ),
        (
            "cohere2_moe",
            {
                "mlp_layer_types": None,
                "first_k_dense_replace": 3,
                "layer_types": None,
                "prefix_dense_sliding_window_pattern": 2,
                "num_hidden_layers": 4,
                "expert_selection_fn": "sigmoid",
                "num_shared_experts": 2,
                "prefix_dense_intermediate_size": None,
            },
        ),
        (
            "cohere2_moe",
            {
                "mlp_layer_types": None,
                "first_k_dense_replace": 3,
                "layer_types": None,
                "prefix_dense_sliding_window_pattern": 3,
                "num_hidden_layers": 7,
            },
        ),
        ("cohere2_moe", {"mlp_layer_types": None, "num_shared_experts": 0}),
        ("cohere2_moe", {"mlp_layer_types": None, "layer_types": [FULL] * 3}),  # no layer turns
        ("cohere2_moe", {"rms_norm_eps": 1e-3, "norm_topk_prob": False, "rope_theta": 5e4}),
        ("cwm", {"layer_types": None, "rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("cwm", {"layer_types": None, "num_hidden_layers": 5}),
        ("helium", {"attention_bias": True, "mlp_bias": True, "rope_theta": 1e5}),
        ("hyperclovax", {"attention_multiplier": None, "logits_scaling": 0.3, "attention_bias": True}),
        ("granite_swa", {"layer_types": None, "layer_rope_theta": None, "num_hidden_layers": 5, "rope_theta": 5e4}),
        ("vaultgemma", {"layer_types": None, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0}),
        ("flex_olmo", {"norm_topk_prob": True, "attention_bias": True}),
        (
            "mellum",
            {
                "rope_parameters": {
                    FULL: {**YARN, "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0},
                    SLIDING: {"rope_type": "default", "rope_theta": 3e3},
                },
                "mlp_layer_types": None,
                "norm_topk_prob": False,
            },
        ),
        ("mellum", {"layer_types": None, "mlp_layer_types": ["sparse", "dense", "sparse"]}),
        ("minimax_m2", {"use_qk_norm": True, "scoring_func": "sigmoid", "rope_theta": 5e6, "rotary_dim": 4}),
        ("minimax_m2", {"partial_rotary_factor": 1.0}),
        ("afmoe", {"layer_types": None, "global_attn_every_n_layers": 2, "mup_enabled": False, "route_scale": 2.4}),
        ("afmoe", {"num_shared_experts": 2, "num_dense_layers": 2, "norm_topk_prob": False, "n_group": 2}),
        ("dots1", {"layer_types": None, "max_window_layers": 1, "first_k_dense_replace": 2, "norm_topk_prob": True}),
        ("dots1", {"sliding_window": None, "layer_types": None, "n_shared_experts": 2, "routed_scaling_factor": 2.5}),
        (
            "exaone_moe",
            {
                "layer_types": None,
                "sliding_window_pattern": 2,
                "mlp_layer_types": None,
                "first_k_dense_replace": 2,
                "num_shared_experts": 2,
            },
        ),
        ("exaone_moe", {"layer_types": [FULL] * 3, "norm_topk_prob": False, "n_group": 1, "topk_group": 1}),
        ("flint", {"layer_types": None, "mlp_only_layers": None, "num_hidden_layers": 7}),
        ("flint", {"mlp_only_layers": [2], "norm_topk_prob": False, "attention_bias": True}),
        ("granitemoeshared", {"shared_intermediate_size": 0, "attention_bias": True}),
        ("granitemoe_swa", {"layer_types": None, "layer_rope_theta": [3e3, 0, 5e4], "shared_intermediate_size": 0}),
        ("granitemoe_swa", {"layer_rope_theta": [3e3, 0, 5e4], "rope_scaling": {"type": "linear", "factor": 2.0}}),
        # as the first files of Scout and of Maverick say it
        (
            "llama4",
            {
                "attention_chunk_size": 13,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 16.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 32,
                },
                "no_rope_layers": [],
                "layer_types": None,
                "moe_layers": [0, 1, 2, 3],
            },
        ),
        (
            "llama4_maverick",
            {
                "rope_scaling": None,
                "rope_theta": 5e4,
                "no_rope_layers": [1, 1, 0, 1],
                "moe_layers": None,
                "attn_temperature_tuning": False,
                "attention_bias": True,
            },
        ),
        (
            "llama4",
            {"layer_types": [FULL, CHUNKED, CHUNKED, FULL], "no_rope_layer_interval": 3},
        ),
        ("llama4", {"attention_chunk_size": None, "moe_layers": [2], "intermediate_size_mlp": 40}),
        ("llama4", {"norm_topk_prob": True}),  # a key that it does not have
        ("gemma4", {"query_pre_attn_scalar": 8, "num_experts": 4}),  # nor it these
        ("gemma4_moe", {"num_global_key_value_heads": None}),
        ("llama4_maverick", {"moe_layers": []}),  # no experts: all layers in one call, until queries grow
        ("llama4_maverick", {"moe_layers": [], "attn_temperature_tuning": False}),
        ("llama4", {"num_local_experts": 1, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
        ("hy_v3", {"mlp_layer_types": None, "router_scaling_factor": 1.5, "num_shared_experts": 2, "mlp_bias": False}),
        ("hy_v3", {"norm_topk_prob": False, "n_group": 2}),  # keys of others
        ("hunyuan_moe", {"moe_topk": [2] * 3, "moe_intermediate_size": [72] * 3, "num_shared_expert": [1] * 3}),
        ("hunyuan_moe", {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}, "attention_bias": True}),
        ("hunyuan", {"rope_scaling": {"type": "dynamic", "factor": 1.0}}),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 4, "num_hidden_layers": 5},
        ),
        ("qwen2_moe", {"qkv_bias": False, "decoder_sparse_step": 2, "norm_topk_prob": True}),
        ("qwen2_moe", {"decoder_sparse_step": 3}),
        (
            "qwen2_moe",
            {
                "use_sliding_window": True,
                "mlp_only_layers": [1],
                "layer_types": [FULL, SLIDING, FULL],
                "sliding_window": 9,
            },
        ),
        ("solar_open", {"first_k_dense_replace": 2, "intermediate_size": 40, "rope_theta": 5e4}),
        (
            "solar_open",
            {"attention_bias": True, "norm_topk_prob": False, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
        ),
    ],
)
def test_keys_mean_what_they_mean_to_transformers(variant: str, keys: dict[str, Any], tmp_path: Path) -> None:
    reference = save_published(tmp_path, variant, **keys)
    tokens = random_tokens(60, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance_of(variant), rtol=0)


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("llama", "rms_norm_eps"),
        ("gemma2", "rms_norm_eps"),
        ("qwen3", "rms_norm_eps"),
        ("olmo2", "rms_norm_eps"),
        ("hunyuan", "rms_norm_eps"),
        ("llama4", "rms_norm_eps"),
        ("gemma3n", "rms_norm_eps"),
        ("gemma4", "rms_norm_eps"),
        ("gemma4_moe", "rms_norm_eps"),
        ("deepseek_v2", "rms_norm_eps"),  # in attention 1e-6, whatever the file says
        ("minicpm3", "rms_norm_eps"),
        ("kimi_linear", "rms_norm_eps"),
        ("qwen3_5", "rms_norm_eps"),
        ("olmo_hybrid", "rms_norm_eps"),
        ("jamba", "rms_norm_eps"),
        ("falcon_h1_norm", "rms_norm_eps"),
        ("falcon_mamba", "mixer_rms_eps"),
        ("cohere_qk_norm", "layer_norm_eps"),
        ("nemotron_h", "layer_norm_epsilon"),
    ],
)
def test_the_number_in_norms_is_the_files(variant: str, name: str, tmp_path: Path) -> None:
    """One so large that a norm with another number, or a scale before a norm, shows; op by op too."""
    reference, tokens = save_published(tmp_path, variant, **{name: 0.05}), random_tokens(30, seed=9)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(whole_prompt_logits(model, tokens), theirs, atol=tolerance_of(variant), rtol=0)
    if model.layer_stack is not None:
        model.layer_stack = None
        torch.testing.assert_close(whole_prompt_logits(model, tokens), theirs, atol=tolerance_of(variant), rtol=0)


def test_ministral_turns_as_the_first_ones_did_where_the_file_says_nothing() -> None:
    default = transformers.Ministral3Config().rope_parameters
    silent, told = (read("Ministral3ForCausalLM", rope_parameters=rope) for rope in (None, default))
    assert silent.ropes == told.ropes
    assert (silent.ropes[0] or RopeConfig()).query_growth == 0.1
    assert read("MistralForCausalLM", rope_parameters=default).ropes[0] != told.ropes[0], "its queries do not grow"


def test_queries_grow_as_in_transformers() -> None:
    positions = torch.tensor([0, 15, 16, 31, 32, 500, 262_143])
    theirs = get_llama_4_attn_scale(positions[None], 0.4, 16)
    torch.testing.assert_close(query_growth(positions, 0.4, 16), theirs.view(-1, 1, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_queries_of_llama_4_grow_from_the_token_on_that_ends_a_step_of_it(length: int, tmp_path: Path) -> None:
    reference, tokens = save_published(tmp_path, "llama4", floor_scale=8), random_tokens(length, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance_of("llama4"), rtol=0)


@pytest.mark.parametrize(
    ("pattern", "windows"), [("LLLG", [7, 7, 7, None, 7, None]), ("LG", [7, None] * 3), ("L", [7] * 5 + [None])]
)
def test_exaones_word_of_layers(pattern: str, windows: list[int | None]) -> None:
    config = read("Exaone4ForCausalLM", num_hidden_layers=6, sliding_window=7, sliding_window_pattern=pattern)
    assert config.sliding_windows == tuple(windows)
    assert [rope is not None for rope in config.ropes] == [window is not None for window in windows]


@pytest.mark.parametrize(
    ("architecture", "keys", "message"),
    [
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLX"}, r"'sliding_window_pattern' is 'LLX', not a word"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, r"clip_qkv 8.0 is not supported; null is"),
        ("Glm4MoeForCausalLM", {"n_shared_experts": 0}, r"'n_shared_experts' is 0, not a whole number above 0"),
        ("Ernie4_5_MoeForCausalLM", {"moe_norm_min": 0.3}, r"moe_norm_min 0.3 is not supported; 1e-12 is"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, r"use_bias true is not supported in a mixture"),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_interval": 0}, r"'moe_layer_interval' is 0, not a whole number"),
        ("Ministral3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
         r"llama_4_scaling_beta needs yarn's original_max_position_embeddings"),
        ("BambaForCausalLM", {"mamba_n_heads": 6, "attn_layer_indices": []}, r"none of 3 layers has full_attention"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 8, "projectors_bias": True}, r"projectors_bias true is not supp"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 8, "mlp_multipliers": [0.0, 1.0]}, r"key 'mlp_gate' is 0.0, not a"),
        ("FalconH1ForCausalLM", {"mamba_n_heads": 7}, r"7 Mamba heads of 146 are not the 1024 that"),
        ("HunYuanDenseV1ForCausalLM", {"rope_scaling": {"type": "dynamic", "alpha": -1}}, r"key 'alpha' is -1, not a"),
        ("JambaForCausalLM", {"attn_layer_offset": 5}, r"none of 3 layers has full_attention, and at least one must"),
        ("JambaForCausalLM", {"mamba_expand": "x"}, r"key 'mamba_expand' is 'x', not a whole number above 0"),
        ("JambaForCausalLM", {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_conv": 1},
         r"Mamba behind a convolution over 1 token is not supported; over at least 2 it is"),
        ("MambaForCausalLM", {"expand": 0}, r"key 'expand' is 0, not a number above 0"),
        ("MambaForCausalLM", {"time_step_rank": 0}, r"key 'time_step_rank' is 0, not a whole number above 0"),
        ("Mamba2ForCausalLM", {"state_size": "x"}, r"key 'state_size' is 'x', not a whole number above 0"),
        ("FalconMambaForCausalLM", {"layer_norm_epsilon": 0}, r"key 'layer_norm_epsilon' is 0, not a number above 0"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-", "ssm_state_size": 0},
         r"key 'ssm_state_size' is 0, not a whole number above 0"),
        ("FalconMambaForCausalLM", {"mixer_rms_eps": 0}, r"key 'mixer_rms_eps' is 0, not a number above 0"),
        ("BambaForCausalLM", {"mamba_n_heads": 5, "attn_layer_indices": [1]}, r"5 Mamba heads of 19 are not the 96"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, r"attention_bias true is not supported with latent"),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 7}, r"qk_rope_head_dim 7 is not supported; it must be even"),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": 0}, r"'kv_lora_rank' is 0, not a whole number above 0"),
        ("DeepseekV3ForCausalLM", {"v_head_dim": "x"}, r"'v_head_dim' is 'x', not a whole number above 0"),
        ("DeepseekV3ForCausalLM", {"v_head_dim": None}, r"'v_head_dim' is None, not a whole number above 0"),
        ("DeepseekV3ForCausalLM", {"q_lora_rank": 0}, r"'q_lora_rank' is 0, not a whole number above 0"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, r"scoring_func 'softmax' is not supported; sigmoid is"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, r"moe_layer_freq 2 is not supported; 1 is"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, r"'n_group' is 7 with topk_group 4, .* does not go together"),
        ("DeepseekV3ForCausalLM", {"topk_group": 9}, r"'n_group' is 8 with topk_group 9, .* does not go together"),
        ("DeepseekV3ForCausalLM", {"topk_group": 1, "num_experts_per_tok": 33}, r"topk_group 1, and 33 of 256"),
        ("DeepseekV3ForCausalLM", {"n_group": 256, "topk_group": 9}, r"'n_group' is 256 with topk_group 9, "),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, r"norm_topk_prob true is not supported; false is"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, r"topk_method 'noaux_tc' is not supported; greedy and"),
        ("Glm4MoeForCausalLM", {"n_group": 3}, r"'n_group' is 3 with topk_group 1, .* does not go together"),
        ("MiniCPM3ForCausalLM", {"dim_model_base": 0}, r"'dim_model_base' is 0, not a number above 0"),
        ("Glm4MoeLiteForCausalLM", {"mlp_layer_types": ["dense"]}, r"'mlp_layer_types' has 1 values for 3 layers"),
        ("CohereForCausalLM", {"logit_scale": 0}, r"key 'logit_scale' is 0, not a number above 0"),
        ("FalconForCausalLM", {"alibi": True}, r"alibi true is not supported; Falcon models with RoPE are"),
        ("PhiForCausalLM", {"qk_layernorm": True}, r"qk_layernorm true is not supported; false is"),
        ("GPTJForCausalLM", {"rotary_dim": None}, r"key 'rotary_dim' is None, not a whole number above 0"),
        ("Cohere2MoeForCausalLM", {"expert_selection_fn": "top"}, r"_fn 'top' is not supported; softmax and sig"),
        ("Cohere2MoeForCausalLM", {"shared_expert_combination_strategy": "max"}, r"_strategy 'max' is not supported"),
        ("HyperCLOVAXForCausalLM", {"use_post_norm": False}, r"use_post_norm False is not supported; True is"),
        ("HyperCLOVAXForCausalLM", {"residual_multiplier": 0.5}, r"residual_multiplier 0.5 is not supported; 1.0 is"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [1, 2, 1]}, r"moe_topk \[1, 2, 1\] is not supported; one number"),
        ("MiniMaxM2ForCausalLM", {"scoring_func": "softmax"}, r"scoring_func 'softmax' is not supported; sigmoid is"),
        ("MiniMaxM2ForCausalLM", {"rotary_dim": "all"}, r"key 'rotary_dim' is 'all', not a whole number above 0"),
        ("Dots1ForCausalLM", {"n_routed_experts": 8}, r"'n_shared_experts' is None, not a whole number above 0"),
        ("AfmoeForCausalLM", {"attention_bias": True}, r"attention_bias true is not supported; false is"),
        ("SolarOpenForCausalLM", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported; 1.0"),
        ("AfmoeForCausalLM", {"num_shared_experts": 0}, r"'n_shared_experts' is 0, not a whole number above 0"),
        ("KimiLinearForCausalLM", {"num_hidden_layers": 6, "mla_use_nope": False}, r"mla_use_nope False is not supp"),
        ("KimiLinearForCausalLM", {"attn_res_block_size": 12}, r"attn_res_block_size 12 is not"),
        ("KimiLinearForCausalLM", {"mla_use_output_gate": True}, r"mla_use_output_gate True is not supported; False"),
        ("KimiLinearForCausalLM", {"moe_layer_freq": 2}, r"moe_layer_freq 2 is not supported; 1 is"),
        ("KimiLinearForCausalLM", {"moe_router_activation_func": "softmax"}, r"_func 'softmax' is not supported"),
        ("KimiLinearForCausalLM", {"routed_expert_hidden_size": 64}, r"routed_expert_hidden_size 64 is not supported"),
        ("KimiLinearForCausalLM", {"linear_attn_config": {"use_full_rank_gate": True}}, r"use_full_rank_gate True is"),
        ("KimiLinearForCausalLM", {"linear_attn_config": {"gate_lower_bound": -5.0}}, r"gate_lower_bound -5.0 is not"),
        ("KimiLinearForCausalLM", {"layer_types": ["linear_attention"] * 3}, r"layers .* are not supported; some"),
        ("KimiLinearForCausalLM", {"layer_types": [FULL, SLIDING, FULL]}, r"layers .* are not supported; some of"),
        ("PhiForCausalLM", {"hidden_act": "relu"}, r"hidden_act 'relu' is not supported; gelu_new is"),
        ("ArceeForCausalLM", {"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported; relu2 is"),
        ("KimiLinearForCausalLM", {"num_hidden_layers": 6, "linear_num_heads": 0}, r"'linear_num_heads' is 0, not a"),
        ("Llama4ForCausalLM", {"layer_types": [FULL, SLIDING, FULL]}, r"'sliding_attention' is not supported; full_"),
        ("Llama4ForCausalLM", {"layer_types": [FULL]}, r"'layer_types' has 1 values for 3 layers"),
        ("Llama4ForCausalLM", {"attention_chunk_size": 0}, r"'attention_chunk_size' is 0, not a whole number above 0"),
        ("Llama4ForCausalLM", {"no_rope_layers": [1]}, r"'no_rope_layers' has 1 values for 3 layers"),
        ("Llama4ForCausalLM", {"no_rope_layer_interval": 0}, r"'no_rope_layer_interval' is 0, not a whole number"),
        ("Llama4ForCausalLM", {"moe_layers": 2}, r"key 'moe_layers' is 2, not a list of layers"),
        ("Llama4ForCausalLM", {"interleave_moe_layer_step": 0}, r"'interleave_moe_layer_step' is 0, not a whole"),
        ("Llama4ForCausalLM", {"intermediate_size": 0}, r"key 'intermediate_size' is 0, not a whole number above 0"),
        ("Llama4ForCausalLM", {"intermediate_size_mlp": "x"}, r"'intermediate_size_mlp' is 'x', not a whole number"),
        ("Llama4ForCausalLM", {"num_local_experts": 0}, r"'num_local_experts' is 0, not a whole number above 0"),
        ("Llama4ForCausalLM", {"floor_scale": 0}, r"'floor_scale' is 0, not a whole number above 0"),
        ("Llama4ForCausalLM", {"attn_scale": None}, r"'attn_scale' is None, not a number above 0"),
        ("MellumForCausalLM", {"mlp_layer_types": ["sparse"]}, r"'mlp_layer_types' has 1 values for 3 layers"),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [0, 1]}, r"'layer_rope_theta' has 2 values for 3 layers"),
        ("YoutuForCausalLM", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor 0.5 is not supported; 1.0 is"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_said(architecture: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(architecture, **keys)
