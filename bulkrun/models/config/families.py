"""The table of decoder families: one row per architecture, everything else about a family is a flag. Torch-free.

A row says which keys of config.json the family reads, with transformers' defaults: a key that it does not list has no
meaning for it, whatever the file says. Those of Llama's own blocks stand in `llama_families`, mixtures of experts in
`expert_families`, those of which some layers keep a state in `hybrid_families` and, where it is Mamba's, in
`mamba_families`, Gemma's in `gemma_families`, those with layer normalization in `layer_norm_families`.
"""

from __future__ import annotations

from typing import Any

from bulkrun.models.config.expert_families import MIXTURES
from bulkrun.models.config.family import BIASES, GRANITE_KEYS, LLAMA3_ROPE, WINDOW, Family
from bulkrun.models.config.family_files import (
    of_ernie,
    of_exaone,
    of_hunyuan,
    of_hyperclovax,
    with_full_fourths,
)
from bulkrun.models.config.gemma_families import GEMMAS
from bulkrun.models.config.hybrid_families import HYBRIDS
from bulkrun.models.config.latent_families import LATENTS
from bulkrun.models.config.layer_norm_families import LAYER_NORMS
from bulkrun.models.config.llama_families import LLAMAS
from bulkrun.models.config.mamba_families import MAMBAS

_APERTUS_ROPE = LLAMA3_ROPE | {"rope_theta": 12_000_000.0, "factor": 8.0}  # where the file says nothing
_QWEN = WINDOW | {"max_position_embeddings": 32_768, "num_key_value_heads": 32}
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
    "HeliumForCausalLM": Family(
        "helium",
        "Helium",
        "RoPE of neighbouring dimensions",
        {
            "head_dim": 128,
            "num_key_value_heads": 20,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-8,
            "rope_theta": 100_000.0,
            "attention_out_bias": False,
        }
        | BIASES,
        norm_rounds_once=True,
        turns_neighbours=True,
    ),
    "HyperCLOVAXForCausalLM": Family(
        "hyperclovax",
        "HyperCLOVA X SEED",
        "as Granite, norms around both blocks",
        GRANITE_KEYS | BIASES,
        norms="sandwich",
        in_common_words=of_hyperclovax,
    ),
    "ApertusForCausalLM": Family(
        "apertus",
        "Apertus",
        "MLPs without gates, with an activation of two trained numbers, QK-norm",
        {
            "hidden_act": "xielu",
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-5,
            "rope_theta": 12_000_000.0,
            "attention_bias": False,
        },
        qk_norm="head",
        has_mlp_gates=False,
        rope=_APERTUS_ROPE,
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
        | BIASES,
        turns_neighbours=True,
        in_common_words=of_ernie,
    ),
    "NanoChatForCausalLM": Family(
        "nanochat",
        "nanochat",
        "norms without weights, of embeddings too, QK-norm behind RoPE, MLPs without gates, soft-cap of logits",
        {
            "hidden_act": "relu2",
            "hidden_size": 768,
            "intermediate_size": 8192,
            "num_attention_heads": 6,
            "num_hidden_layers": 12,
            "vocab_size": 50_304,
            "attention_bias": False,
            "final_logit_softcapping": 15.0,
        },
        qk_norm="head",  # behind RoPE, which leaves lengths as they are
        has_mlp_gates=False,
        norm_weights=False,
        norms_embeddings=True,
        turns_backwards=True,
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
        | WINDOW,
        qk_norm="projection",
        norms="post",
        norm_rounds_once=True,
    ),
    "GraniteSWAForCausalLM": Family(
        "granite_swa",
        "Granite Swash (dense)",
        "as Granite, attention sinks, sliding window layers",
        GRANITE_KEYS
        | BIASES
        | {
            "num_key_value_heads": 4,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "layer_types": None,
            "layer_rope_theta": None,
        },
        has_sinks=True,
        in_common_words=with_full_fourths,
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "Granite 3.x (dense)",
        "multipliers of embeddings, residuals, attention and logits",
        GRANITE_KEYS | BIASES,
    ),
}
FAMILIES = LLAMAS | _DENSE | LAYER_NORMS | GEMMAS | MIXTURES | LATENTS | HYBRIDS | MAMBAS
