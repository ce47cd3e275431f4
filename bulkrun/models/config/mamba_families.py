"""The part of the table of families with Mamba's state spaces, in some of their layers or in all. Torch-free."""

from __future__ import annotations

from typing import Any

from bulkrun.models.config.family import BY_SIGMOID, GRANITE_KEYS, Family
from bulkrun.models.config.mamba import mamba_of
from bulkrun.models.config.mamba2 import mamba2_of
from bulkrun.models.config.mamba_files import (
    of_bamba,
    of_falcon,
    of_granite,
    of_jamba,
    of_mamba,
    of_mamba2,
    of_nemotron,
)

_STATES: dict[str, Any] = {
    "linear_layers": None,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_MAMBA2: dict[str, Any] = _STATES | {
    "mamba_n_heads": 128,
    "mamba_d_head": None,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "time_step_limit": None,
}
_MAMBA: dict[str, Any] = _STATES | {
    "mamba_inner_size": None,
    "mamba_d_state": 16,
    "mamba_dt_rank": "auto",
    "mamba_norms": "none",
    "mixer_rms_eps": 1e-6,
}
_STATES_ALONE: dict[str, Any] = {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "num_attention_heads": None,
    "intermediate_size": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "position_embedding_type": "none",
    "mlp_alone": None,
}
_MAMBA_ALONE = _STATES_ALONE | _MAMBA
_OF_MAMBA: dict[str, Any] = {"in_common_words": of_mamba, "recurrence": mamba_of}

MAMBAS: dict[str, Family] = {
    "GraniteMoeHybridForCausalLM": Family(
        "granitemoehybrid",
        "Granite 4.0 (Micro, Tiny, Small; with Mamba 2 and without)",
        "Mamba 2, multipliers, experts beside a shared MLP",
        {
            **GRANITE_KEYS,
            "position_embedding_type": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": None,
            "shared_expert_intermediate_size": None,
            **_MAMBA2,
        },
        gates_shared_expert=False,
        in_common_words=of_granite,
        recurrence=mamba2_of,
    ),
    "BambaForCausalLM": Family(
        "bamba",
        "Bamba",
        "Mamba 2, partial RoPE",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 262_144,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "attention_bias": False,
            "mlp_bias": False,
            **_MAMBA2,
        },
        in_common_words=of_bamba,
        recurrence=mamba2_of,
    ),
    "FalconH1ForCausalLM": Family(
        "falcon_h1",
        "Falcon-H1, Falcon-H1R",
        "attention and Mamba 2 beside each other in each layer, multipliers",
        {
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "mlp_bias": False,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "attends_beside_states": True,
            "embedding_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
            "attention_out": 1.0,
            "state_out": 1.0,
            "state_parts": None,
            "mlp_gate": 1.0,
            "mlp_out": 1.0,
            **_MAMBA2,
        },
        in_common_words=of_falcon,
        recurrence=mamba2_of,
    ),
    "JambaForCausalLM": Family(
        "jamba",
        "Jamba 1.5 and 2, Jamba Reasoning",
        "Mamba, attention without positions, experts in every other layer",
        {
            "max_position_embeddings": 262_144,
            "num_key_value_heads": 8,
            "position_embedding_type": "none",
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
            **_MAMBA,
            "mamba_norms": "learned",
        },
        in_common_words=of_jamba,
        recurrence=mamba_of,
    ),
    "MambaForCausalLM": Family("mamba", "Mamba", "Mamba alone", _MAMBA_ALONE, **_OF_MAMBA),
    "FalconMambaForCausalLM": Family(
        "falcon_mamba",
        "Falcon Mamba",
        "as Mamba, normalized steps",
        _MAMBA_ALONE | {"max_position_embeddings": 8192, "mamba_norms": "plain"},
        **_OF_MAMBA,
    ),
    "Mamba2ForCausalLM": Family(
        "mamba2",
        "Mamba 2, Codestral Mamba",
        "Mamba 2 alone",
        _STATES_ALONE
        | _MAMBA2
        | {
            "hidden_size": 4096,
            "num_hidden_layers": 64,
            "vocab_size": 32_768,
            "tie_word_embeddings": False,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 8,
        },
        in_common_words=of_mamba2,
        recurrence=mamba2_of,
    ),
    "NemotronHForCausalLM": Family(
        "nemotron_h",
        "Nemotron-H, Nemotron Nano v2, Nemotron 3 Nano",
        "Mamba 2, attention without positions, MLPs and experts without gates, each a layer",
        {
            "hidden_act": "relu2",
            "head_dim": 128,
            "intermediate_size": 21_504,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "num_key_value_heads": 8,
            "num_hidden_layers": None,
            "mlp_bias": False,
            "position_embedding_type": "none",
            "num_experts": None,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": None,
            "mlp_alone": None,
            **BY_SIGMOID,
            **_MAMBA2,
        },
        norm_rounds_once=True,
        has_mlp_gates=False,
        gates_shared_expert=False,
        routes_in_float32=True,
        expert_scores="sigmoid",
        in_common_words=of_nemotron,
        recurrence=mamba2_of,
    ),
}
