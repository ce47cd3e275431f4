"""The part of the table of families with Llama's own blocks, which differ in keys, windows and RoPE. Torch-free."""

from __future__ import annotations

from bulkrun.models.config.family import BIASES, LLAMA3_ROPE, WINDOW, Family
from bulkrun.models.config.family_files import with_full_fourths

_MISTRAL = WINDOW | {"max_position_embeddings": 131_072, "num_attention_heads": 32, "num_key_value_heads": 8}
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
_CWM_ROPE = LLAMA3_ROPE | {"rope_theta": 1_000_000.0, "factor": 16.0}  # so too

LLAMAS: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        "Llama 2, 3, 3.1, 3.2 (text) and models of their shape",
        "RoPE: default, linear, llama3, yarn, dynamic",
        BIASES,
    ),
    "MistralForCausalLM": Family(
        "mistral", "Mistral; the text part of Mistral Small 3.1, 3.2, Magistral", "sliding window", _MISTRAL
    ),
    "MinistralForCausalLM": Family("ministral", "Ministral (8B)", "sliding window layers", _MISTRAL),
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
        {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5} | BIASES,
        has_mlp_gates=False,
    ),
    "CwmForCausalLM": Family(
        "cwm",
        "Code World Model",
        "sliding window layers",
        {
            "head_dim": 128,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "mlp_bias": False,
            "sliding_window": 8192,
            "layer_types": None,
        },
        rope=_CWM_ROPE,
        in_common_words=with_full_fourths,
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
        | BIASES,
    ),
}
