"""The part of the table of families with those of which some layers keep a state in the place of keys. Torch-free."""

from __future__ import annotations

from typing import Any

from bulkrun.models.config.delta_net import delta_net_of
from bulkrun.models.config.family import BY_SIGMOID, Family
from bulkrun.models.config.hybrid_files import (
    of_lfm2,
    of_lfm2_moe,
    of_lfm3,
    of_olmo_hybrid,
    of_qwen,
)
from bulkrun.models.config.short_conv import short_conv_of

# three layers of linear attention to one of attention, where positions turn a quarter of a head
_DELTA_NET: dict[str, Any] = {
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "linear_layers": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DELTA_NET_MOE: dict[str, Any] = _DELTA_NET | {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "intermediate_size": 512,  # of dense layers, if there are any
}

_SHORT_CONV: dict[str, Any] = {
    "rope_theta": 1_000_000.0,
    "max_position_embeddings": 128_000,
    "num_key_value_heads": 8,
    "conv_bias": False,
    "conv_L_cache": 3,
    "linear_layers": None,
}

_OF_QWEN: dict[str, Any] = {
    "qk_norm": "head",
    "norm_offset": 1.0,
    "norm_rounds_once": True,
    "gates_attention": True,
    "in_common_words": of_qwen,
    "recurrence": delta_net_of,
}

HYBRIDS: dict[str, Family] = {
    "Qwen3_5ForCausalLM": Family(
        "qwen3_5_text",
        "Qwen3.5 (dense; the text part)",
        "gated delta nets, gated attention in every fourth layer",
        _DELTA_NET | {"num_key_value_heads": 4},
        **_OF_QWEN,
    ),
    "Qwen3_5MoeForCausalLM": Family(
        "qwen3_5_moe_text",
        "Qwen3.5 (mixture of experts; the text part)",
        "as Qwen3.5, a shared expert beside those of each token",
        _DELTA_NET_MOE | {"num_experts": 256, "num_experts_per_tok": 8},
        **_OF_QWEN,
    ),
    "Qwen3NextForCausalLM": Family(
        "qwen3_next",
        "Qwen3-Next, Qwen3-Coder-Next",
        "as Qwen3.5, a shared expert beside those of each token",
        _DELTA_NET_MOE
        | {
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": None,
        },
        **_OF_QWEN,
    ),
    "OlmoHybridForCausalLM": Family(
        "olmo_hybrid",
        "OLMo Hybrid",
        "gated delta nets whose states may be turned around, attention without positions in every fourth layer",
        {
            "max_position_embeddings": 65_536,
            "attention_bias": False,
            "position_embedding_type": None,
            "linear_layers": None,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
            "linear_num_key_heads": None,
            "linear_num_value_heads": None,
            "linear_allow_neg_eigval": True,
            "linear_norm_eps": 1e-5,  # whatever the file says, as in transformers
        },
        qk_norm="projection",
        norms="post_of_attention",
        norm_rounds_once=True,
        in_common_words=of_olmo_hybrid,
        recurrence=delta_net_of,
    ),
    "Lfm2ForCausalLM": Family(
        "lfm2",
        "LFM2, LFM2.5 (dense)",
        "short convolutions, QK-norm",
        _SHORT_CONV,
        qk_norm="head",
        in_common_words=of_lfm2,
        recurrence=short_conv_of,
    ),
    "Lfm2MoeForCausalLM": Family(
        "lfm2_moe",
        "LFM2 (mixture of experts: 8B-A1B, 24B-A2B)",
        "as LFM2, experts chosen by sigmoid and bias",
        _SHORT_CONV
        | {
            **BY_SIGMOID,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
        },
        qk_norm="head",
        expert_scores="sigmoid",
        in_common_words=of_lfm2_moe,
        recurrence=short_conv_of,
    ),
    "Lfm3ForCausalLM": Family(
        "lfm3",
        "LFM3",
        "as LFM2, sliding window layers with a RoPE of their own, gated heads",
        _SHORT_CONV
        | {
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "conv_L_cache": 7,
            "attention_bias": False,
            "sliding_window": 256,
            "sliding_layers": None,
            "partial_rotary_factor": None,
            "rope_local_base_freq": None,
            "tie_word_embeddings": True,
        },
        qk_norm="head",
        norms="sandwich",
        gates_heads=True,
        in_common_words=of_lfm3,
        recurrence=short_conv_of,
    ),
}
