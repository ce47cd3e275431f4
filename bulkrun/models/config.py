"""What a checkpoint's config.json says, as flags of the one decoder; what the decoder cannot do is refused by name.

Torch-free. One table row per architecture; everything else about a family is a flag. Keys that a config.json
leaves out have transformers' defaults.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes or defaults beyond its config.json."""

    head_dim: int | None = None  # default; None: hidden_size / num_attention_heads
    qkv_bias: bool = False  # always has biases on q, k, v
    qk_norm: bool = False
    window_switch: bool = False  # `sliding_window` counts only with `use_sliding_window`, from `max_window_layers` on
    sliding_window: int | None = None  # default


FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(),
    "MistralForCausalLM": _Family(sliding_window=4096),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, window_switch=True, sliding_window=4096),
    "Qwen3ForCausalLM": _Family(head_dim=128, qk_norm=True, window_switch=True, sliding_window=4096),
}
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]  # per layer; None: full attention
    rope: RopeConfig
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str  # bfloat16, float16 or float32: what the weights are stored in

    @classmethod
    def from_dir(cls, path: Path | str) -> ModelConfig:
        """Read `path`/config.json. Raises ModelError for a missing or broken file and for anything unsupported."""
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ModelError(f"{file}: no such file; a model directory needs a Hugging Face config.json") from None
        except (ValueError, OSError) as error:
            raise ModelError(f"{file}: not readable as JSON ({error}); download the model again") from None
        if not isinstance(raw, dict):
            raise ModelError(f"{file}: holds a {type(raw).__name__}, not an object; download the model again")
        try:
            return cls.from_dict(raw)
        except KeyError as error:
            raise ModelError(f"{file}: key {error} is missing; download the model again") from None
        except ModelError as error:
            raise ModelError(f"{file}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json. Raises ModelError for anything unsupported, KeyError for a missing size."""
        architecture, family = _family(raw)
        _refuse_unsupported(raw)
        num_heads = raw["num_attention_heads"]
        head_dim = raw.get("head_dim") or family.head_dim or raw["hidden_size"] // num_heads
        num_kv_heads = raw.get("num_key_value_heads") or num_heads
        if num_heads % num_kv_heads or head_dim % 2:
            raise ModelError(
                f"{num_heads} query heads over {num_kv_heads} key heads of {head_dim} dimensions is not supported; "
                "query heads must be a multiple of key heads, and the dimension even"
            )
        attention_bias = bool(raw.get("attention_bias", False))
        max_positions = raw.get("max_position_embeddings", 2048)
        return cls(
            architecture=architecture,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=raw["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            max_position_embeddings=max_positions,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=attention_bias and not family.qkv_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family.qk_norm,
            sliding_windows=_sliding_windows(raw, family),
            rope=RopeConfig.from_dict(raw, max_positions),
            bos_token_id=raw.get("bos_token_id"),
            eos_token_ids=_as_ids(raw.get("eos_token_id")),
            dtype=_dtype(raw),
        )


def _family(raw: Mapping[str, Any]) -> tuple[str, _Family]:
    names = raw.get("architectures") or [raw.get("model_type", "unknown")]
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    raise ModelError(f"architecture {', '.join(map(str, names))} is not supported; these are: {', '.join(FAMILIES)}")


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act {raw['hidden_act']!r} is not supported; silu is")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unknown")
        raise ModelError(
            f"weights quantized with {method} are not supported; use the model's {' or '.join(_DTYPES)} checkpoint"
        )


def _sliding_windows(raw: Mapping[str, Any], family: _Family) -> tuple[int | None, ...]:
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window", family.sliding_window)
    if family.window_switch and not raw.get("use_sliding_window", False):
        window = None
    if family.sliding_window is None:  # the architecture has no windows, whatever its config says
        window = None
    if not family.window_switch:
        return (window,) * num_layers
    first = raw.get("max_window_layers", 28)
    sliding = [i >= first for i in range(num_layers)]
    if raw.get("layer_types") is not None:
        sliding = [_is_sliding(kind) for kind in raw["layer_types"]]
    return tuple(window if slides else None for slides in sliding)


def _is_sliding(layer_type: str) -> bool:
    if layer_type not in ("full_attention", "sliding_attention"):
        raise ModelError(f"layer type {layer_type!r} is not supported; full_attention and sliding_attention are")
    return layer_type == "sliding_attention"


def _as_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _dtype(raw: Mapping[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype {name} is not supported; these are: {', '.join(_DTYPES)}")
    return name
