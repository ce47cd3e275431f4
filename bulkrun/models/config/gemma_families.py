"""The part of the table of families with Google's Gemma. Torch-free."""

from __future__ import annotations

from typing import Any

from bulkrun.models.config.family import Family
from bulkrun.models.config.gemma3n_file import of_gemma3n
from bulkrun.models.config.gemma4_file import of_gemma4, of_gemma4_unified

_GEMMA: dict[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA2: dict[str, Any] = _GEMMA | {
    "max_position_embeddings": 8192,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window_pattern": 2,
}
_GEMMA4: dict[str, Any] = _GEMMA | {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "partial_rotary_factor": None,
    "sliding_window": 512,
    "final_logit_softcapping": None,
    "layers_kv": None,
    "keys_are_values": None,
    "mlp_sizes": None,
    "layer_input_size": None,
    "layer_input_vocab_size": None,
}
_OF_GEMMA4: dict[str, Any] = {
    "qk_norm": "head",
    "norms": "sandwich",
    "norm_rounds_once": True,
    "norms_values": True,
    "scales_embeddings": True,
    "scales_layers": True,
    "rope": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
GEMMAS: dict[str, Family] = {
    "GemmaForCausalLM": Family(
        "gemma",
        "Gemma",
        "scaled embeddings",
        {
            "head_dim": 256,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "max_position_embeddings": 8192,
            "attention_bias": False,
            "use_bidirectional_attention": False,
        },
        norm_offset=1.0,
        norm_rounds_once=True,
        scales_embeddings=True,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        "Gemma 2",
        "soft-caps, sliding window layers",
        _GEMMA2,
        norms="sandwich",
        norm_offset=1.0,
        norm_rounds_once=True,
        scales_embeddings=True,
    ),
    "VaultGemmaForCausalLM": Family(
        "vaultgemma",
        "VaultGemma",
        "as Gemma 2, without norms after attention and MLP",
        _GEMMA2,
        norm_offset=1.0,
        norm_rounds_once=True,
        scales_embeddings=True,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        "Gemma 3 (text; of the larger ones the text part)",
        "QK-norm, sliding window layers with a RoPE of their own",
        _GEMMA
        | {
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "final_logit_softcapping": None,
            "sliding_window_pattern": 6,
        },
        qk_norm="head",
        norms="sandwich",
        norm_offset=1.0,
        norm_rounds_once=True,
        scales_embeddings=True,
    ),
    "Gemma3nForCausalLM": Family(
        "gemma3n_text",
        "Gemma 3n (E2B, E4B: the text part)",
        "several residual streams, a low-rank branch, sparse gates, shared keys, per-layer embeddings",
        _GEMMA4
        | {
            "vocab_size": 262_400,
            "max_position_embeddings": 32_768,
            "final_logit_softcapping": 30.0,
            "altup_num_inputs": None,
            "laurel_rank": None,
            "mlp_sparsities": None,
        },
        qk_norm="head",
        norms="sandwich",
        norm_rounds_once=True,
        norms_values=True,
        scales_embeddings=True,
        in_common_words=of_gemma3n,
    ),
    "Gemma4ForCausalLM": Family(
        "gemma4_text",
        "Gemma 4 (E2B, E4B, 26B-A4B, 31B: the text part)",
        "layers with heads of 512 dimensions, shared keys, per-layer embeddings, experts beside an MLP",
        _GEMMA4
        | {
            "num_experts": None,
            "num_experts_per_tok": None,
            "moe_intermediate_size": None,
            "experts_beside_mlp": True,
        },
        in_common_words=of_gemma4,
        **_OF_GEMMA4,
    ),
    "Gemma4UnifiedForCausalLM": Family(
        "gemma4_unified_text",
        "Gemma 4 12B (the text part)",
        "as Gemma 4, without per-layer embeddings and experts",
        _GEMMA4 | {"max_position_embeddings": 262_144, "sliding_window": 1024},
        in_common_words=of_gemma4_unified,
        **_OF_GEMMA4,
    ),
}
