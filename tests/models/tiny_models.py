"""Small random-weight checkpoints on disk, written by transformers itself: the ground truth of the model tests.

Every weight is random, norms and biases included, and wide enough that attention looks at something and the
argmax is clear. Sizes are odd on purpose. No tokenizer is written: engine and models speak token ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.tiny_general import (
    DENSE_FIRST,
    GEMMA3N,
    GEMMA4,
    GENERAL_VARIANTS,
    GROUPED,
    GROWING,
    IN_GROUPS,
    LATENT,
    MIXED,
    MULTIPLIERS,
    NO_GQA,
    SHARED_KV,
    SPARSE,
)

VOCAB_SIZE = 131
EOS_TOKEN_ID = 2

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
SMALL: dict[str, Any] = SIZES | {
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": EOS_TOKEN_ID,
}
_ROPE_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_ROPE_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

_ROPE_LONG = {
    "original_max_position_embeddings": 256,
    "rope_scaling": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 2.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0],
    },
}
_GEMMA = {"head_dim": 16, "sliding_window": 13, "query_pre_attn_scalar": 24, "tie_word_embeddings": True}
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_GPT_OSS = {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 11, "swiglu_limit": 2.0}


_LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 72,
    "num_local_experts": 5,
    "attention_chunk_size": 11,
    "floor_scale": 8,
    "attn_scale": 0.4,
    "pad_token_id": 0,
}

_GLM_MOE = {
    **_EXPERTS,
    "head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}

# three layers with a state to one of attention; twice as many value heads as key heads
DELTA_NET = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}
_SHARED_EXPERT = {**_EXPERTS, "num_experts": 5, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 32}

OLMO_HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 32,
    "pad_token_id": 0,
}

_LFM2 = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 8,
    "tie_word_embeddings": True,
}

GRANITE_H = {
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention", "mamba", "mamba"],
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 72,
    "mamba_n_heads": 2,
    "mamba_d_head": "auto",
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    **MULTIPLIERS,
}

BAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_indices": [1],
    "mamba_n_heads": 2,
    "mamba_d_head": "auto",
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}

_JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "mamba_d_state": 12,
    "mamba_dt_rank": 7,
}

_MAMBA = {"state_size": 12, "time_step_rank": 5, "tie_word_embeddings": True}

FALCON_H1 = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.8,
    "attention_in_multiplier": 0.9,
    "key_multiplier": 0.7,
    "attention_out_multiplier": 1.2,
    "ssm_in_multiplier": 1.3,
    "ssm_multipliers": [0.8, 1.1, 0.9, 1.2, 0.7],
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [1.4, 0.5],
}

NEMOTRON_H = {
    "layers_block_type": ["mamba", "mlp", "mamba", "attention", "mlp"],
    "num_hidden_layers": None,
    "head_dim": 16,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 16,
    "n_groups": 2,
    "time_step_min": 1e-30,  # transformers keeps steps above it in prompts alone
}

_GPT_J = {
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 512,
    "n_inner": 72,
    "rotary_dim": 4,
}
_FALCON = {"ffn_hidden_size": 96, "multi_query": False, "new_decoder_architecture": False}
_HALF_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}

# name -> (architecture, what differs from SMALL)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama_tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama_whole_panels": (
        "LlamaForCausalLM",
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 160},
    ),
    "llama_mha": ("LlamaForCausalLM", {"num_key_value_heads": 6}),
    "llama_mqa": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama_biases": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama_head_dim_16": ("LlamaForCausalLM", {"head_dim": 16}),
    "llama_head_dim_80": ("LlamaForCausalLM", {"head_dim": 80}),
    "llama_rope_linear": ("LlamaForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    "llama_rope_llama3": ("LlamaForCausalLM", {"rope_scaling": _ROPE_LLAMA3}),
    "llama_rope_yarn": ("LlamaForCausalLM", {"rope_scaling": _ROPE_YARN}),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral_sliding": ("MistralForCausalLM", {"sliding_window": 13}),
    "ministral3": ("Ministral3ForCausalLM", GROWING | {"head_dim": 16, "sliding_window": None}),
    "apertus": ("ApertusForCausalLM", {"intermediate_size": 96}),
    "arcee": ("ArceeForCausalLM", {}),
    "arcee_whole": ("ArceeForCausalLM", {"intermediate_size": 96, "mlp_bias": True}),
    "seed_oss": ("SeedOssForCausalLM", {"head_dim": 16}),
    "llama4": ("Llama4ForCausalLM", _LLAMA4 | {"num_experts_per_tok": 2, "rope_scaling": _ROPE_LLAMA3}),
    "llama4_maverick": (
        "Llama4ForCausalLM",
        _LLAMA4 | {"interleave_moe_layer_step": 2, "use_qk_norm": False, "no_rope_layers": [1, 0, 1, 1]},
    ),
    "ernie4_5": ("Ernie4_5ForCausalLM", {"head_dim": 16}),
    "ernie4_5_biases": ("Ernie4_5ForCausalLM", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_intermediate_size": 24, "moe_num_experts": 5, "moe_k": 2, "moe_num_shared_experts": 1},
    ),
    "ernie4_5_moe_between": (
        "Ernie4_5_MoeForCausalLM",
        {
            "moe_intermediate_size": 24,
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 6,
            "moe_layer_start_index": 2,
            "moe_layer_end_index": 4,
            "moe_layer_interval": 2,
        },
    ),
    "glm": ("GlmForCausalLM", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4ForCausalLM", {"head_dim": 16, "pad_token_id": 0}),
    "glm4_moe": ("Glm4MoeForCausalLM", _GLM_MOE),
    "glm4_moe_qk_norm": ("Glm4MoeForCausalLM", _GLM_MOE | {"use_qk_norm": True, "attention_bias": True}),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", {"head_dim": 16}),
    "exaone4": ("Exaone4ForCausalLM", {"head_dim": 16, "sliding_window": 9, "sliding_window_pattern": 2}),
    "exaone4_full": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "olmoe": ("OlmoeForCausalLM", {"pad_token_id": 0, "num_experts": 6, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2_sliding": ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "qwen3_tied": ("Qwen3ForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3_sliding": (
        "Qwen3ForCausalLM",
        {"head_dim": 16, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3_rope_yarn": ("Qwen3ForCausalLM", {"head_dim": 16, "rope_scaling": _ROPE_YARN}),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "head_dim": 16, "num_experts": 7, "norm_topk_prob": True, "mlp_only_layers": [1]},
    ),
    "qwen3_moe_sliding": (
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "decoder_sparse_step": 2, "num_experts": 5, "use_sliding_window": True, "sliding_window": 12},
    ),
    "qwen3_moe_whole_panels": (
        "Qwen3MoeForCausalLM",
        {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 6, "num_experts_per_tok": 3, "head_dim": 32},
    ),
    "qwen3_5": ("Qwen3_5ForCausalLM", DELTA_NET),
    "qwen3_5_whole_panels": (
        "Qwen3_5ForCausalLM",
        DELTA_NET | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 160},
    ),
    "qwen3_5_tied": ("Qwen3_5ForCausalLM", DELTA_NET | {"tie_word_embeddings": True, "linear_num_value_heads": 2}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", DELTA_NET | _SHARED_EXPERT),
    "qwen3_next": ("Qwen3NextForCausalLM", DELTA_NET | _SHARED_EXPERT | {"mlp_only_layers": [1]}),
    "olmo_hybrid": ("OlmoHybridForCausalLM", OLMO_HYBRID),
    "olmo_hybrid_rope": (
        "OlmoHybridForCausalLM",
        OLMO_HYBRID
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", _LFM2),
    "lfm2_biases": (
        "Lfm2ForCausalLM",
        _LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": True},
    ),
    "lfm2_moe": ("Lfm2MoeForCausalLM", _LFM2 | _EXPERTS | {"num_experts": 6, "num_dense_layers": 1}),
    "lfm3": (
        "Lfm3ForCausalLM",
        {
            "num_hidden_layers": 5,
            "layer_types": ["conv", "sliding_attention", "conv", "full_attention", "conv"],
            "head_dim": 16,
            "conv_L_cache": 5,
            "pad_token_id": 0,
            "sliding_window": 11,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": ("NemotronHForCausalLM", NEMOTRON_H),
    "nemotron_h_whole": ("NemotronHForCausalLM", NEMOTRON_H | {"intermediate_size": 96}),
    "nemotron_h_moe": (
        "NemotronHForCausalLM",
        NEMOTRON_H
        | {
            "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba", "mlp"],
            "n_routed_experts": 6,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 40,
            "routed_scaling_factor": 2.5,
        },
    ),
    "granite_moe": (
        "GraniteMoeForCausalLM",
        MULTIPLIERS | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "granite_h": ("GraniteMoeHybridForCausalLM", GRANITE_H),
    "granite_h_moe": (
        "GraniteMoeHybridForCausalLM",
        GRANITE_H
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 32, "mamba_proj_bias": True}
        | {"position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_conv_bias": False},
    ),
    "bamba": ("BambaForCausalLM", BAMBA),
    "falcon_h1": ("FalconH1ForCausalLM", FALCON_H1),
    "falcon_h1_norm": (
        "FalconH1ForCausalLM",
        FALCON_H1 | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 1, "mlp_bias": True},
    ),
    "jamba": ("JambaForCausalLM", _JAMBA),
    "jamba_dense": (
        "JambaForCausalLM",
        _JAMBA | {"num_experts": 1, "mamba_dt_rank": "auto", "mamba_conv_bias": False, "mamba_proj_bias": True},
    ),
    "jamba_whole_panels": (
        "JambaForCausalLM",
        _JAMBA
        | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_experts": 1, "vocab_size": 160},
    ),
    "mamba": ("MambaForCausalLM", _MAMBA),
    "mamba_whole_panels": (
        "MambaForCausalLM",
        _MAMBA | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 160},
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_heads": 6, "head_dim": 16, "state_size": 16, "n_groups": 2, "tie_word_embeddings": False},
    ),
    "falcon_mamba": (
        "FalconMambaForCausalLM",
        _MAMBA | {"use_conv_bias": False, "use_bias": True, "intermediate_size": 96},
    ),
    "granite_4": ("GraniteMoeHybridForCausalLM", GRANITE_H | {"layer_types": ["attention"] * 4}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOssForCausalLM", _GPT_OSS),
    "gpt_oss_whole_panels": (
        "GptOssForCausalLM",
        _GPT_OSS | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8},
    ),
    "gemma": ("GemmaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2ForCausalLM", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0}),
    "gemma2_uncapped": (
        "Gemma2ForCausalLM",
        _GEMMA | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": ("Gemma3ForCausalLM", _GEMMA | {"sliding_window_pattern": 3}),
    "gemma3_rope_linear": (
        "Gemma3ForCausalLM",
        _GEMMA | {"sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "gemma3n": ("Gemma3nForCausalLM", GEMMA3N),
    "gemma3n_whole_panels": (
        "Gemma3nForCausalLM",
        GEMMA3N
        | {
            "hidden_size": 64,
            "intermediate_size": [96] * 5,
            "num_attention_heads": 4,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 32,
            "altup_num_inputs": 4,
        },
    ),
    "gemma4": ("Gemma4ForCausalLM", GEMMA4),
    "gemma4_whole_panels": (
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "hidden_size_per_layer_input": 32,
            "vocab_size": 160,
            "vocab_size_per_layer_input": 160,
        },
    ),
    "gemma4_unified_whole_panels": (
        "Gemma4UnifiedForCausalLM",
        SHARED_KV
        | {
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_kv_shared_layers": 1,
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4_moe": (
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_unified": (
        "Gemma4UnifiedForCausalLM",
        SHARED_KV | {"global_head_dim": 32, "num_kv_shared_layers": 0, "num_global_key_value_heads": 1},
    ),
    "deepseek_v2": ("DeepseekV2ForCausalLM", LATENT | GROUPED | {"topk_method": "group_limited_greedy"}),
    "deepseek_v2_lite": (
        "DeepseekV2ForCausalLM",
        LATENT | GROUPED | {"q_lora_rank": None, "rope_scaling": _ROPE_YARN | {"mscale": 0.7, "mscale_all_dim": 0.5}},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT | GROUPED),
    "moonlight": (
        "DeepseekV3ForCausalLM",
        LATENT | GROUPED | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2},
    ),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", LATENT | GROUPED | {"v_head_dim": 20}),
    "mistral4": ("Mistral4ForCausalLM", LATENT | GROUPED | GROWING | {"qk_nope_head_dim": 8}),
    "minicpm3": ("MiniCPM3ForCausalLM", LATENT),
    "youtu": ("YoutuForCausalLM", LATENT | {"kv_lora_rank": 32, "tie_word_embeddings": True}),
    "kimi_linear": (
        "KimiLinearForCausalLM",
        LATENT
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "q_lora_rank": None,
            "moe_intermediate_size": 24,
            "num_experts": 8,
            "num_experts_per_token": 3,
            "num_shared_experts": 1,
            "linear_num_heads": 3,
            "linear_head_dim": 16,
            "pad_token_id": 0,
        },
    ),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "phi3_sliding": ("Phi3ForCausalLM", {"pad_token_id": 0, "sliding_window": 14}),
    "phi3_partial_rotary": ("Phi3ForCausalLM", {"pad_token_id": 0, "partial_rotary_factor": 0.75}),
    "phi3_longrope": ("Phi3ForCausalLM", {"pad_token_id": 0, **_ROPE_LONG}),
    "olmo2": ("Olmo2ForCausalLM", {"rms_norm_eps": 1e-5}),
    "olmo2_biases": ("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 6}),
    "olmo3": (
        "Olmo3ForCausalLM",
        {
            "sliding_window": 11,
            "rope_scaling": _ROPE_YARN,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "smollm3_sliding": (
        "SmolLM3ForCausalLM",
        {"pad_token_id": 0, "no_rope_layers": [1, 0, 0], "use_sliding_window": True, "sliding_window": 10},
    ),
    "granite": ("GraniteForCausalLM", MULTIPLIERS),
    "granite_biases_tied": (
        "GraniteForCausalLM",
        MULTIPLIERS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "ministral": ("MinistralForCausalLM", {"head_dim": 16, "sliding_window": 11}),
    "cohere": ("CohereForCausalLM", {"pad_token_id": 0, "logit_scale": 0.5}),
    "cohere_qk_norm": (
        "CohereForCausalLM",
        {"pad_token_id": 0, "logit_scale": 1.5, "use_qk_norm": True, "tie_word_embeddings": True},
    ),
    "cohere2": (
        "Cohere2ForCausalLM",
        {"pad_token_id": 0, "head_dim": 8, "sliding_window": 9, "sliding_window_pattern": 2, "logit_scale": 0.5},
    ),
    "cohere2_moe": (
        "Cohere2MoeForCausalLM",
        MIXED
        | DENSE_FIRST
        | {
            "pad_token_id": 0,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "num_shared_experts": 1,
            "logit_scale": 0.5,
            "prefix_dense_intermediate_size": 56,
        },
    ),
    "cwm": ("CwmForCausalLM", MIXED),
    "helium": ("HeliumForCausalLM", {"head_dim": 8}),
    "hyperclovax": ("HyperCLOVAXForCausalLM", MULTIPLIERS | {"head_dim": 16, "residual_multiplier": 1.0}),
    "granite_swa": ("GraniteSWAForCausalLM", MIXED | MULTIPLIERS | {"layer_rope_theta": [0, 5e4, 3e3]}),
    "vaultgemma": ("VaultGemmaForCausalLM", MIXED | {"query_pre_attn_scalar": 24, "tie_word_embeddings": True}),
    "flex_olmo": ("FlexOlmoForCausalLM", {"pad_token_id": 0, "num_experts": 5, "num_experts_per_tok": 2}),
    "mellum": ("MellumForCausalLM", MIXED | SPARSE | DENSE_FIRST),
    "minimax_m2": (
        "MiniMaxM2ForCausalLM",
        {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2},
    ),
    "afmoe": (
        "AfmoeForCausalLM",
        MIXED | SPARSE | {"num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True},
    ),
    "dots1": ("Dots1ForCausalLM", GROUPED | MIXED | {"n_shared_experts": 1}),
    "exaone_moe": ("ExaoneMoeForCausalLM", MIXED | SPARSE | IN_GROUPS | DENSE_FIRST),
    "flint": ("FlintForCausalLM", MIXED | SPARSE | {"shared_expert_intermediate_size": 24}),
    "granitemoeshared": (
        "GraniteMoeSharedForCausalLM",
        MULTIPLIERS | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 24},
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAForCausalLM",
        MIXED
        | MULTIPLIERS
        | {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 32, "intermediate_size": 24},
    ),
    "hy_v3": ("HYV3ForCausalLM", SPARSE | DENSE_FIRST | {"head_dim": 16}),
    "hunyuan_moe": (
        "HunYuanMoEV1ForCausalLM",
        {"head_dim": 16, "num_experts": 5, "moe_topk": 2, "moe_intermediate_size": 24},
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            "moe_intermediate_size": 24,
            "num_experts_per_tok": 3,
            "num_experts": 5,
            "shared_expert_intermediate_size": 32,
        },
    ),
    "solar_open": ("SolarOpenForCausalLM", GROUPED | {"head_dim": 16}),
    "codegen": ("CodeGenForCausalLM", _GPT_J | {"n_head": 4, "num_attention_heads": 4}),
    "falcon": ("FalconForCausalLM", _FALCON | {"multi_query": True}),
    "falcon_new": (
        "FalconForCausalLM",
        _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", NO_GQA | _HALF_ROPE),
    "gpt_neox_whole": (
        "GPTNeoXForCausalLM",
        NO_GQA | {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96},
    ),
    "gptj": ("GPTJForCausalLM", _GPT_J),
    "jais2": ("Jais2ForCausalLM", {"head_dim": 16}),
    "nanochat": ("NanoChatForCausalLM", {"intermediate_size": 96}),
    "nemotron": ("NemotronForCausalLM", {"head_dim": 8, "intermediate_size": 96}),
    "olmo": ("OlmoForCausalLM", {}),
    "olmo_limit": ("OlmoForCausalLM", {"clip_qkv": 0.7}),
    "phi": ("PhiForCausalLM", {}),
    "stablelm": ("StableLmForCausalLM", _HALF_ROPE),
    "stablelm_beside": (
        "StableLmForCausalLM",
        _HALF_ROPE | {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "starcoder2": ("Starcoder2ForCausalLM", {"sliding_window": 15}),
    # from here on the general path
    "gpt2": ("GPT2LMHeadModel", NO_GQA),
    "opt": ("OPTForCausalLM", NO_GQA | {"ffn_dim": 72, "word_embed_proj_dim": 32, "pad_token_id": 0}),
}


def known(variants: Iterable[str]) -> list[str]:
    """Those of the variants whose architecture this version of transformers has."""
    architectures = {name: architecture for name, (architecture, _) in (VARIANTS | GENERAL_VARIANTS).items()}
    return [name for name in variants if hasattr(transformers, architectures[name])]


def make_tiny_model(variant: str = "llama", *, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """The transformers model of a variant, float32, in eval mode. `overrides` are Hugging Face config keys."""
    architecture, changes = (VARIANTS | GENERAL_VARIANTS)[variant]
    model_class = getattr(transformers, architecture)
    config = model_class.config_class(**deepcopy(SMALL | changes | overrides))  # RoPE's values are written into
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32).eval()
        randomize(model)
    for module in model.modules():
        if type(module).__name__ == "GptOssExperts":
            module.limit = (
                config.swiglu_limit
            )  # transformers 5.17 has the published one in its code, 5.24 reads the key
        if type(module).__name__ == "Gemma3nTextModel":  # 5.17 does so only where a model sees and hears too
            module.embed_tokens_per_layer.register_forward_pre_hook(_of_table)
    return model


def _of_table(table: torch.nn.Embedding, given: tuple[torch.Tensor]) -> torch.Tensor:
    """Ids as they are looked up: those beyond the table as 0."""
    return torch.where(given[0] < table.num_embeddings, given[0], 0)


def save_tiny_model(
    path: Path | str,
    variant: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a variant as a Hugging Face checkpoint (configs and safetensors) and return its directory."""
    model = make_tiny_model(variant, seed=seed, **overrides).to(dtype)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return Path(path)


def save_published(path: Path, variant: str, *, seed: int = 0, **keys: Any) -> transformers.PreTrainedModel:
    """Write a variant under a config.json as it may be on the hub, and return what transformers makes of that.

    `keys` are the file's, besides the sizes: no version of transformers has written them anew.
    """
    architecture, changes = (VARIANTS | GENERAL_VARIANTS)[variant]
    model_type = getattr(transformers, architecture).config_class.model_type
    raw = {"architectures": [architecture], "model_type": model_type, **SMALL, **changes, **keys}
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(raw))
    config = transformers.AutoConfig.from_pretrained(path)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        randomize(model)
    model.save_pretrained(path)
    (path / "config.json").write_text(json.dumps(raw))
    return model


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    """Rewrite the checkpoint with tensors added, replaced, or (None) removed; `__` in a name stands for a dot."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


def edit_names(path: Path, rename: Callable[[str], str]) -> None:
    """Rewrite the checkpoint with other tensor names."""
    file = path / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file, {"format": "pt"})


def split_llama4_experts(path: Path) -> None:
    """Rewrite the checkpoint with each expert's matrices by themselves, as files of 8 bits have them."""
    file, tensors = path / "model.safetensors", {}
    for name, tensor in load_file(path / "model.safetensors").items():
        prefix, _, kind = name.rpartition(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
        for expert, matrix in enumerate(tensor) if parts else ():
            for part, rows in zip(parts, matrix.T.chunk(len(parts)), strict=True):
                tensors[f"{prefix}.experts.{expert}.{part}.weight"] = rows.contiguous()
        if not parts:
            tensors[name] = tensor
    save_file(tensors, file, {"format": "pt"})


@torch.no_grad()
def randomize(model: transformers.PreTrainedModel) -> None:
    for name, parameter in model.named_parameters():
        if re.search(r"(norm|ln_\w|ln)\.weight$", name):
            parameter.uniform_(0.5, 1.5)
        elif parameter.ndim == 1:
            parameter.normal_(std=0.3)
        else:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    for name, buffer in model.named_buffers():
        if re.search(r"(layer_scalar|correction_bias|expert_bias)$", name):
            buffer.uniform_(0.5, 1.5)
