"""The part of the table of families with layer normalization: norms that subtract the mean. Torch-free."""

from __future__ import annotations

from typing import Any

from bulkrun.models.config.family import BIASES, Family
from bulkrun.models.config.layer_norm_files import (
    of_codegen,
    of_cohere,
    of_cohere_moe,
    of_falcon,
    of_gpt_neox,
    of_nemotron4,
    of_olmo,
    of_phi,
    of_stablelm,
    of_starcoder,
    with_layer_norm_eps,
)

_EPS = {"rms_norm_eps": 1e-5}
_COHERE: dict[str, Any] = {
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "logits_scaling": 16.0,
}
_OF_COHERE: dict[str, Any] = {
    "norms": "beside",
    "are_centered": True,
    "turns_neighbours": True,
    "in_common_words": of_cohere,
}
_WITH_BIASES: dict[str, Any] = {"are_centered": True, "norm_biases": True}
_PLAIN: dict[str, Any] = {**_WITH_BIASES, "has_mlp_gates": False}
_GPT_J: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "vocab_size": 50_400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "partial_rotary_factor": 1.0,
    "mlp_bias": True,
    **_EPS,
}
LAYER_NORMS: dict[str, Family] = {
    "CohereForCausalLM": Family(
        "cohere",
        "Command R, R+, Aya Expanse, Aya 23",
        "layer normalization, attention and MLP beside each other",
        _COHERE | {"rope_theta": 500_000.0, "use_qk_norm": False},
        **_OF_COHERE,
    ),
    "Cohere2ForCausalLM": Family(
        "cohere2",
        "Command R7B, Command A",
        "as Cohere, RoPE in sliding window layers alone",
        _COHERE
        | {
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "layer_types": None,
            "rope_in_windows_alone": True,
        },
        **_OF_COHERE,
    ),
    "Cohere2MoeForCausalLM": Family(
        "cohere2_moe",
        "Command A+",
        "as Cohere 2, experts beside shared ones, and both beside attention",
        _COHERE
        | {
            "head_dim": 128,
            "sliding_window": 4096,
            "layer_types": None,
            "no_rope_layers": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "mlp_only_layers": None,
            "mlp_sizes": None,
            "shared_expert_intermediate_size": None,
            "averages_shared_expert": False,
            "expert_scores": "softmax",
            "are_centered": True,
        },
        gates_shared_expert=False,
        **_OF_COHERE | {"in_common_words": of_cohere_moe},
    ),
    "FalconForCausalLM": Family(
        "falcon",
        "Falcon (7B, 40B, 180B), Falcon 2 (11B)",
        "layer normalization, attention and MLP beside each other, MLPs without gates; not with ALiBi",
        {"hidden_act": "gelu", "tie_word_embeddings": True, "norms": "beside", **_EPS, **BIASES},
        **_PLAIN,
        in_common_words=of_falcon,
    ),
    "GPTJForCausalLM": Family(
        "gptj",
        "GPT-J",
        "layer normalization, attention and MLP beside each other, partial RoPE of neighbouring dimensions",
        _GPT_J,
        **_PLAIN,
        norms="beside",
        has_head_bias=True,
        turns_neighbours=True,
        in_common_words=of_codegen,
    ),
    "CodeGenForCausalLM": Family(
        "codegen",
        "CodeGen",
        "as GPT-J",
        _GPT_J,
        **_PLAIN,
        norms="beside",
        has_head_bias=True,
        turns_neighbours=True,
        in_common_words=of_codegen,
    ),
    "GPTNeoXForCausalLM": Family(
        "gpt_neox",
        "GPT-NeoX, Pythia, Dolly 2",
        "layer normalization, attention and MLP beside each other, partial RoPE, MLPs without gates, biases",
        {
            "hidden_act": "gelu",
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "mlp_bias": True,
            "norms": "beside_own",
            **_EPS,
        },
        **_PLAIN,
        in_common_words=of_gpt_neox,
    ),
    "Jais2ForCausalLM": Family(
        "jais2",
        "Jais 2",
        "layer normalization, MLPs without gates, biases",
        {
            "hidden_act": "relu2",
            "max_position_embeddings": 8192,
            "attention_bias": True,
            "mlp_bias": True,
            **_EPS,
        },
        **_PLAIN,
        in_common_words=with_layer_norm_eps,
    ),
    "NemotronForCausalLM": Family(
        "nemotron",
        "Nemotron-4, Minitron",
        "layer normalization, partial RoPE, MLPs without gates",
        {
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            **_EPS,
            **BIASES,
        },
        **_PLAIN,
        norm_offset=1.0,
        in_common_words=of_nemotron4,
    ),
    "OlmoForCausalLM": Family(
        "olmo",
        "OLMo (1B, 7B)",
        "layer normalization without weights",
        {"attention_bias": False, "clip_qkv": None, **_EPS},
        are_centered=True,
        norm_weights=False,
        in_common_words=of_olmo,
    ),
    "PhiForCausalLM": Family(
        "phi",
        "Phi-1, Phi-1.5, Phi-2",
        "layer normalization, attention and MLP beside each other, partial RoPE, MLPs without gates, biases",
        {
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
            **_EPS,
        },
        **_PLAIN,
        norms="beside",
        has_head_bias=True,
        in_common_words=of_phi,
    ),
    "StableLmForCausalLM": Family(
        "stablelm",
        "StableLM 3B, StableLM 2 (1.6B, 12B), Stable Code",
        "layer normalization, partial RoPE",
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "attention_bias": False,
            "attention_out_bias": False,
            "use_qk_norm": False,
            "norms": "pre",
            **_EPS,
        },
        **_WITH_BIASES,
        in_common_words=of_stablelm,
    ),
    "Starcoder2ForCausalLM": Family(
        "starcoder2",
        "StarCoder2",
        "layer normalization, MLPs without gates, sliding window, biases",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "sliding_window": None,
            "tie_word_embeddings": True,
            **_EPS,
            **BIASES,
        },
        **_PLAIN,
        in_common_words=of_starcoder,
    ),
}
