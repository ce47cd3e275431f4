"""Public model shapes that can be measured without a checkpoint: a config.json, and random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MIN_POSITIONS = 8192


def _shape(
    architecture: str, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int, **keys: Any
) -> Mapping[str, Any]:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        **keys,
    }


def _one_full_in(interval: int, num_layers: int) -> list[str]:
    kinds = ["sliding_attention"] * (interval - 1) + ["full_attention"]
    return kinds * (num_layers // interval)


_GEMMA4 = {"model_type": "gemma4_text", "tie_word_embeddings": True, "hidden_size_per_layer_input": 256,
           "final_logit_softcapping": 30.0}  # fmt: skip
_GEMMA3N = {"model_type": "gemma3n_text", "tie_word_embeddings": True}
_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1}
_KIMI_FULL = (3, 7, 11, 15, 19, 23, 26)  # the layers that attend
_EXPERTS_OF_GPT_OSS = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
_LLAMA4_ROPE = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 1.0, "original_max_position_embeddings": 8192}  # fmt: skip
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": _shape(
        "LlamaForCausalLM", 4096, 14_336, 32, 32, 8, 128_256, model_type="llama", rms_norm_eps=1e-5, rope_theta=5e5
    ),
    "qwen3-8b": _shape(
        "Qwen3ForCausalLM", 4096, 12_288, 36, 32, 8, 151_936, model_type="qwen3", head_dim=128, rope_theta=1e6
    ),
    "qwen3-0.6b": _shape(
        "Qwen3ForCausalLM", 1024, 3072, 28, 16, 8, 151_936, model_type="qwen3", head_dim=128, rope_theta=1e6,
        tie_word_embeddings=True,
    ),
    "qwen3.5-9b": _shape("Qwen3_5ForCausalLM", 4096, 12_288, 32, 16, 4, 248_320, model_type="qwen3_5_text"),
    "gemma-3n-e2b": _shape(
        "Gemma3nForCausalLM", 2048, 8192, 30, 8, 2, 262_400, **_GEMMA3N, num_kv_shared_layers=10
    ),
    "gemma-3n-e4b": _shape(
        "Gemma3nForCausalLM", 2048, 16_384, 35, 8, 2, 262_400, **_GEMMA3N, num_kv_shared_layers=15
    ),
    "gemma-4-e2b": _shape(
        "Gemma4ForCausalLM", 1536, 6144, 35, 8, 1, 262_144, **_GEMMA4, layer_types=_one_full_in(5, 35),
        num_kv_shared_layers=20, use_double_wide_mlp=True,
    ),
    "gemma-4-e4b": _shape(
        "Gemma4ForCausalLM", 2560, 10_240, 42, 8, 2, 262_144, **_GEMMA4, layer_types=_one_full_in(6, 42),
        num_kv_shared_layers=18,
    ),
    "gpt-oss-20b": _shape(
        "GptOssForCausalLM", 2880, 2880, 24, 64, 8, 201_088, model_type="gpt_oss", rms_norm_eps=1e-5, head_dim=64,
        **_EXPERTS_OF_GPT_OSS,
    ),
    "glm-4.7-flash": _shape(
        "Glm4MoeLiteForCausalLM", 2048, 10_240, 47, 20, 20, 154_880, model_type="glm4_moe_lite", **_LATENT,
        rms_norm_eps=1e-5, rope_theta=1e6, q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, n_routed_experts=64,
        n_shared_experts=1, num_experts_per_tok=4, moe_intermediate_size=1536, routed_scaling_factor=1.8,
    ),
    "deepseek-v2-lite": _shape(
        "DeepseekV2ForCausalLM", 2048, 10_944, 27, 16, 16, 102_400, model_type="deepseek_v2", **_LATENT,
        q_lora_rank=None, qk_nope_head_dim=128, v_head_dim=128, n_routed_experts=64, n_shared_experts=2,
        num_experts_per_tok=6, moe_intermediate_size=1408, first_k_dense_replace=1,
    ),
    "kimi-linear-48b-a3b": _shape(
        "KimiLinearForCausalLM", 2304, 9216, 27, 32, 32, 163_840, model_type="kimi_linear", kv_lora_rank=512,
        qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, num_experts=256, num_experts_per_token=8,
        num_shared_experts=1, moe_intermediate_size=1024, routed_scaling_factor=2.446,
        layer_types=["full_attention" if layer in _KIMI_FULL else "linear_attention" for layer in range(27)],
    ),
    "llama-4-scout": _shape(
        "Llama4ForCausalLM", 5120, 8192, 48, 40, 8, 202_048, model_type="llama4_text", head_dim=128,
        rope_parameters=_LLAMA4_ROPE,
    ),
    "llama-4-maverick": _shape(
        "Llama4ForCausalLM", 5120, 8192, 48, 40, 8, 202_048, model_type="llama4_text", head_dim=128,
        num_local_experts=128, interleave_moe_layer_step=2, use_qk_norm=False,
    ),
    "command-r7b": _shape(
        "Cohere2ForCausalLM", 4096, 14_336, 32, 32, 8, 256_000, model_type="cohere2", rope_theta=5e4, logit_scale=0.25,
        layer_types=_one_full_in(4, 32), sliding_window=4096, tie_word_embeddings=True,
    ),
    "nemotron-nano-9b-v2": _shape(
        "NemotronHForCausalLM", 4480, 15_680, 56, 40, 8, 131_072, model_type="nemotron_h", mamba_head_dim=80,
        hybrid_override_pattern="M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    ),
    "falcon-mamba-7b": _shape(
        "FalconMambaForCausalLM", 4096, 8192, 64, 1, 1, 65_024, model_type="falcon_mamba", state_size=16,
        time_step_rank=256, tie_word_embeddings=False,
    ),
    "granite-4.0-h-tiny": _shape(
        "GraniteMoeHybridForCausalLM", 1536, 512, 40, 12, 4, 100_352, model_type="granitemoehybrid", rms_norm_eps=1e-5,
        layer_types=["attention" if layer % 10 == 5 else "mamba" for layer in range(40)], tie_word_embeddings=True,
        num_local_experts=64, num_experts_per_tok=6, shared_intermediate_size=1024, mamba_n_heads=48,
        mamba_d_state=128, embedding_multiplier=12, residual_multiplier=0.22, attention_multiplier=0.0078125,
        logits_scaling=6,
    ),
    "lfm2-1.2b": _shape(
        "Lfm2ForCausalLM", 2048, 12_288, 16, 32, 8, 65_536, model_type="lfm2", full_attn_idxs=[2, 5, 8, 10, 12, 14],
        tie_word_embeddings=True,
    ),
    "llama-20m": _shape("LlamaForCausalLM", 384, 1024, 8, 6, 2, 8192, model_type="llama", rms_norm_eps=1e-5),
}  # fmt: skip
SHAPE_NAMES = (*_SHAPES,)


def write_shape(name: str, folder: Path, *, dtype: str, max_model_len: int) -> Path:
    """Write the config.json of a shape into `folder`, which is then a model for `load_format: dummy`; returns it."""
    config = {
        **_SHAPES[name],
        "torch_dtype": dtype,
        "max_position_embeddings": max(max_model_len, _MIN_POSITIONS),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
