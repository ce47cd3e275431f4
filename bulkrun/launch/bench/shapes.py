"""Public model shapes that can be measured without a checkpoint: a config.json, and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "head_dim": 128}
_GPT_OSS = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "head_dim": 64}
_QWEN3_5 = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "rms_norm_eps": 1e-6}
SHAPE_NAMES = ("llama-3.1-8b", "qwen3-8b", "qwen3-0.6b", "qwen3.5-9b", "gpt-oss-20b", "llama-20m")
_MIN_POSITIONS = 8192


def write_shape(name: str, folder: Path, *, dtype: str, max_model_len: int) -> Path:
    """Write the config.json of a shape into `folder`, which is then a model for `load_format: dummy`; returns it."""
    config = _sizes(name) | {
        "torch_dtype": dtype,
        "max_position_embeddings": max(max_model_len, _MIN_POSITIONS),
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _sizes(name: str) -> dict[str, Any]:
    if name == "llama-3.1-8b":
        sizes = _shape(4096, 14336, 32, 32, 8, 128256)
        return _LLAMA | sizes | {"rope_theta": 500000.0, "tie_word_embeddings": False}
    if name == "qwen3-8b":
        sizes = _shape(4096, 12288, 36, 32, 8, 151936)
        return _QWEN3 | sizes | {"rope_theta": 1000000.0, "tie_word_embeddings": False}
    if name == "qwen3-0.6b":
        sizes = _shape(1024, 3072, 28, 16, 8, 151936)
        return _QWEN3 | sizes | {"rope_theta": 1000000.0, "tie_word_embeddings": True}
    if name == "qwen3.5-9b":
        return _QWEN3_5 | _shape(4096, 12288, 32, 16, 4, 248320) | {"tie_word_embeddings": False}
    if name == "gpt-oss-20b":
        experts = {"num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128}
        return _GPT_OSS | _shape(2880, 2880, 24, 64, 8, 201088) | experts | {"tie_word_embeddings": False}
    assert name == "llama-20m", f"no shape {name}"
    return _LLAMA | _shape(384, 1024, 8, 6, 2, 8192) | {"rope_theta": 10000.0, "tie_word_embeddings": False}


def _shape(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
    }
