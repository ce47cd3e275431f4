"""The table of decoder families: one row per architecture, everything else about a family is a flag. Torch-free.

A row says which keys of config.json the family reads, with transformers' defaults: a key that it does not list has no
meaning for it, whatever the file says. Mixtures of experts stand in `expert_families`, those of which some layers keep
a state in `hybrid_families`, Gemma's in `gemma_families`.
"""

from __future__ import annotations

from typing import Any

from bulkrun.models.config.expert_families import MIXTURES
from bulkrun.models.config.family import GRANITE_KEYS, Family
from bulkrun.models.config.family_files import of_ernie, of_exaone, of_hunyuan
from bulkrun.models.config.gemma_families import GEMMAS
from bulkrun.models.config.hybrid_families import HYBRIDS
from bulkrun.models.config.latent_families import LATENTS

_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOW = {"sliding_window": 4096, "layer_types": None}
_MISTRAL = _WINDOW | {"max_position_embeddings": 131_072, "num_attention_heads": 32, "num_key_value_heads": 8}
_MINISTRAL_ROPE = {  # where the file says nothing
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_QWEN = _WINDOW | {"max_position_embeddings": 32_768, "num_key_value_heads": 32}
_QWEN |= {"use_sliding_window": False, "max_window_layers": 28}
_GLM: dict[str, Any] = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "attention_out_bias": False,
}
_DENSE: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        "Llama 2, 3, 3.1, 3.2 (text) and models of their shape",
        "RoPE: default, linear, llama3, yarn, dynamic",
        _BIASES,
    ),
    "MistralForCausalLM": Family(
        "mistral", "Mistral; the text part of Mistral Small 3.1, 3.2, Magistral", "sliding window", _MISTRAL
    ),
    "Ministral3ForCausalLM": Family(
        "ministral3",
        "Ministral 3 (the text part)",
        "yarn, queries that grow beyond the original context",
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "grows_queries": True,
        },
        rope=_MINISTRAL_ROPE,
    ),
    "ArceeForCausalLM": Family(
        "arcee",
        "Arcee AFM 4.5B",
        "MLPs without gates",
        {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | _BIASES,
    ),
    "SeedOssForCausalLM": Family(
        "seed_oss",
        "Seed-OSS",
        "biases",
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 524_288,
            "attention_bias": True,
            "attention_out_bias": False,
            "mlp_bias": False,
        },
    ),
    "Ernie4_5ForCausalLM": Family(
        "ernie4_5",
        "ERNIE 4.5 (dense)",
        "RoPE of neighbouring dimensions",
        {
            "head_dim": 128,
            "num_key_value_heads": 2,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": True,
        }
        | _BIASES,
        turns_neighbours=True,
        in_common_words=of_ernie,
    ),
    "GlmForCausalLM": Family(
        "glm", "GLM-4 (9B)", "partial RoPE of neighbouring dimensions, biases", _GLM, turns_neighbours=True
    ),
    "Glm4ForCausalLM": Family(
        "glm4",
        "GLM-4-0414 (9B, 32B), GLM-Z1",
        "as GLM-4, norms around both blocks",
        _GLM,
        norms="sandwich",
        turns_neighbours=True,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        "hunyuan_v1_dense",
        "Hunyuan (0.5B to 7B), Hunyuan-MT, HY-MT1.5",
        "QK-norm behind RoPE",
        {"rms_norm_eps": 1e-5, "attention_bias": False},
        qk_norm="turned_head",
        in_common_words=of_hunyuan,
    ),
    "Exaone4ForCausalLM": Family(
        "exaone4",
        "EXAONE 4.0",
        "norms after attention and MLP, QK-norm, RoPE in sliding window layers alone",
        {
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "rope_in_windows_alone": True,
        },
        qk_norm="head",
        norms="post",
        in_common_words=of_exaone,
    ),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", "biases, sliding window layers", _QWEN, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "Qwen3 (dense)",
        "QK-norm",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        qk_norm="head",
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "Phi-3, Phi-3.5 (mini, medium), Phi-4, Phi-4-mini",
        "partial RoPE; longrope models up to their original context",
        {
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "partial_rotary_factor": 1.0,
        },
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        "OLMo 2",
        "norms after attention and MLP, QK-norm of the whole projection",
        {"rms_norm_eps": 1e-5, "attention_bias": False},
        qk_norm="projection",
        norms="post",
        norm_rounds_once=True,
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        "OLMo 3",
        "as OLMo 2, sliding window layers without RoPE scaling",
        {
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "rope_local_base_freq": None,
            "attention_bias": False,
            "sliding_window_pattern": 4,
        }
        | _WINDOW,
        qk_norm="projection",
        norms="post",
        norm_rounds_once=True,
    ),
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        "SmolLM3",
        "layers without RoPE",
        {
            "rope_theta": 2_000_000.0,
            "max_position_embeddings": 32_768,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "layer_types": None,
            "use_sliding_window": False,
            "sliding_window": None,
        }
        | _BIASES,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "Granite 3.x (dense)",
        "multipliers of embeddings, residuals, attention and logits",
        GRANITE_KEYS | _BIASES,
    ),
}
FAMILIES = _DENSE | GEMMAS | MIXTURES | LATENTS | HYBRIDS
