"""The table of decoder families: one row per architecture, everything else about a family is a flag. Torch-free.

A row says which keys of config.json the family reads, with transformers' defaults: a key that it does not list has no
meaning for it, whatever the file says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bulkrun.errors import ModelError

NormPlacement = Literal["pre", "post", "sandwich"]
QKNorm = Literal["none", "head", "projection"]


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and what its config.json may say."""

    model_type: str  # transformers' name for its configuration
    models: str  # which published models are of it
    notes: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # read beyond _COMMON_KEYS, or with another default
    qkv_bias: bool = False  # always has biases on q, k and v, never on o
    qk_norm: QKNorm = "none"  # "head": each head by itself; "projection": all heads of q, all of k, as one vector
    norms: NormPlacement = "pre"  # before attention and MLP, after them, or both
    norm_offset: float = 0.0  # added to a norm's stored weight
    norm_rounds_once: bool = False  # norms multiply by their weight in float32
    scales_embeddings: bool = False  # by the square root of hidden_size
    has_sinks: bool = False  # attention's softmax has a learned score beside those of the keys
    has_expert_biases: bool = False  # of a mixture's router and experts
    rope: Mapping[str, Any] = field(default_factory=dict)  # where the file says nothing of its scaling


_COMMON_KEYS: Mapping[str, Any] = {
    "head_dim": None,  # hidden_size / num_attention_heads
    "num_key_value_heads": None,  # num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
_MAX_LAYERS = 10_000  # a hundred times those of any model: a damaged file says more
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_FACTORS = (
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "logits_scaling",
)  # fmt: skip
_BIASES = {"attention_bias": False, "mlp_bias": False}
_WINDOW = {"sliding_window": 4096, "layer_types": None}
_MISTRAL = _WINDOW | {"max_position_embeddings": 131_072, "num_attention_heads": 32, "num_key_value_heads": 8}
_QWEN = _WINDOW | {"max_position_embeddings": 32_768, "num_key_value_heads": 32}
_QWEN |= {"use_sliding_window": False, "max_window_layers": 28}
_GEMMA: Mapping[str, Any] = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "attention_bias": False,
    "use_bidirectional_attention": False,
    **_WINDOW,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        "Llama 2, 3, 3.1, 3.2 (text) and models of their shape",
        "RoPE: default, linear, llama3, yarn, dynamic",
        _BIASES,
    ),
    "MistralForCausalLM": Family(
        "mistral", "Mistral; the text part of Mistral Small 3.1, 3.2, Magistral", "sliding window", _MISTRAL
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        "Mixtral",
        "mixture of experts",
        {
            "rope_theta": 1_000_000.0,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "sliding_window": None,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "Qwen2ForCausalLM": Family("qwen2", "Qwen2, Qwen2.5", "biases, sliding window layers", _QWEN, qkv_bias=True),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        "Qwen3 (dense)",
        "QK-norm",
        _QWEN | {"head_dim": 128, "attention_bias": False},
        qk_norm="head",
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        "Qwen3 (mixture of experts)",
        "QK-norm",
        {
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "attention_bias": False,
            "sliding_window": 4096,
            "use_sliding_window": False,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": False,
            "mlp_only_layers": None,
        },
        qk_norm="head",
    ),
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
        _GEMMA
        | {
            "max_position_embeddings": 8192,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window_pattern": 2,
        },
        norms="sandwich",
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
    "GptOssForCausalLM": Family(
        "gpt_oss",
        "gpt-oss-20b, gpt-oss-120b (MXFP4 or bfloat16)",
        "mixture of experts with biases, attention sinks, sliding window layers",
        {
            "head_dim": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "num_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        norm_rounds_once=True,
        has_sinks=True,
        has_expert_biases=True,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    "GraniteForCausalLM": Family(
        "granite",
        "Granite 3.x (dense)",
        "multipliers of embeddings, residuals, attention and logits",
        {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,
            "logits_scaling": 1.0,
        }
        | _BIASES,
    ),
}


def read_keys(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys the family reads, from the file or by default.

    Raises KeyError for a size that is missing and has no default, ModelError for one that is not a number.
    """
    keys = {name: raw.get(name, default) for name, default in (_COMMON_KEYS | family.keys).items()}
    if "num_experts" in keys and "num_local_experts" in raw:  # Mixtral's name, and what transformers 5 writes
        keys["num_experts"] = raw["num_local_experts"]
    for size in _SIZES:
        keys[size] = raw[size] if size in raw else family.keys[size]
    for name in (*_SIZES, "max_position_embeddings", "rms_norm_eps", "rope_theta"):
        check_number(name, keys[name], float if name in ("rms_norm_eps", "rope_theta") else int)
    if keys["num_hidden_layers"] > _MAX_LAYERS:
        raise ModelError(f"key 'num_hidden_layers' is {keys['num_hidden_layers']}, not a number of layers")
    for name in ("num_key_value_heads", "head_dim", *_FACTORS):
        if keys.get(name) is not None:
            check_number(name, keys[name], float if name in _FACTORS else int)
    return keys


def check_number(name: str, value: Any, kind: type[int] | type[float]) -> None:
    """Raise ModelError unless the value of a key is a number of the kind above 0."""
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not (is_number and value > 0):
        wanted = "whole number" if kind is int else "number"
        raise ModelError(f"key {name!r} is {value!r}, not a {wanted} above 0; download the model again")
