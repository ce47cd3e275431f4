"""Variants of the general path alone: nearly all architectures that it is tried with; `tiny_models` makes them."""

from __future__ import annotations

from typing import Any

NO_GQA = {"num_key_value_heads": None}  # the architecture knows no such key
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
    "logits_scaling": 2.5,
}

# keys of more dimensions than values, made of latents
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# experts of which a token may have those of some groups alone
GROUPED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}

MIXED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "sliding_window": 9, "head_dim": 16}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
SPARSE = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 2}
IN_GROUPS = {"n_group": 3, "topk_group": 2}
# queries grow beyond the original context
GROWING = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "llama_4_scaling_beta": 0.4,
    },
}
_PER_LAYER_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 131}
SHARED_KV = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "sliding_window": 9,
    "head_dim": 16,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
GEMMA4 = {
    **SHARED_KV,
    **_PER_LAYER_INPUTS,
    "global_head_dim": 32,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 7.0,
}

GEMMA3N = {
    **SHARED_KV,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 97,  # less than the vocabulary, as published
    "final_logit_softcapping": 7.0,
    "laurel_rank": 8,
    "altup_num_inputs": 3,
    "intermediate_size": [72, 72, 48, 72, 104],
    "activation_sparsity_pattern": [0.95, 0.7, 0.0, 0.3, 0.0],
}

# the rest of the architectures that the general path is tried with: less often, for time's sake
GENERAL_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "biogpt": ("BioGptForCausalLM", NO_GQA),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", NO_GQA),
    "gpt_bigcode_mha": ("GPTBigCodeForCausalLM", NO_GQA | {"multi_query": False}),
    "persimmon": ("PersimmonForCausalLM", NO_GQA),
    "phimoe": ("PhimoeForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 131_072}),
    # of 2025 and 2026
    "apertus1p5": ("Apertus1p5TextForCausalLM", {"head_dim": 16}),
    "axk1": ("AXK1ForCausalLM", LATENT | GROUPED | DENSE_FIRST),
    "beam": ("BeamForCausalLM", MIXED | SPARSE | IN_GROUPS | DENSE_FIRST),
    "kolibri1": ("Kolibri1ForCausalLM", MIXED | SPARSE | {"shared_expert_intermediate_size": 24}),
    "laguna": (
        "LagunaForCausalLM",
        MIXED
        | SPARSE
        | DENSE_FIRST
        | {"shared_expert_intermediate_size": 24, "num_attention_heads_per_layer": [6, 8, 6]},
    ),
    "longcat_flash": (
        "LongcatFlashForCausalLM",
        LATENT
        | {
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 72,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashForCausalLM",
        MIXED
        | GROUPED
        | DENSE_FIRST
        | {
            "num_attention_heads": 8,
            "v_head_dim": 10,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 9e4, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        },
    ),
    "modernbert_decoder": (
        "ModernBertDecoderForCausalLM",
        NO_GQA | {"pad_token_id": 0, "local_attention": 18, "global_attn_every_n_layers": 2},
    ),
    # and of before
    "jetmoe": ("JetMoeForCausalLM", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ctrl": ("CTRLLMHeadModel", NO_GQA | {"dff": 72}),
    "dbrx": (
        "DbrxForCausalLM",
        NO_GQA
        | {
            "d_model": 48,
            "n_heads": 6,
            "n_layers": 3,
            "max_seq_len": 512,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 10_000.0, "clip_qkv": 1.0},
            "ffn_config": {"ffn_hidden_size": 72, "moe_num_experts": 4, "moe_top_k": 2},
        },
    ),
}
