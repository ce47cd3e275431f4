"""Small random-weight checkpoints of models that see, or hear, beside the text that is asked of them here."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.models.tiny_models import SMALL, VARIANTS, randomize

_PIXTRAL = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
            "head_dim": 16, "image_size": 28, "patch_size": 14}  # fmt: skip
_CLIP = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "image_size": 28, "patch_size": 14}  # fmt: skip
_SIGLIP = _CLIP | {"model_type": "siglip_vision_model"}
_LFM3 = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
_INTERN = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": [28, 28], "patch_size": [14, 14]}  # fmt: skip
_QWEN = {"depth": 1, "hidden_size": 32, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 48}
_QWEN3 = _QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_GEMMA4 = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
           "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}  # fmt: skip
_LLAMA4 = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
           "image_size": 28, "patch_size": 14, "vision_output_dim": 16, "projector_input_dim": 16,
           "projector_output_dim": 16}  # fmt: skip
_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}}
_AXES3 = {"rope_parameters": _AXES["rope_parameters"] | {"mrope_section": [2, 3, 3], "mrope_interleaved": True}}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 5, "num_experts_per_tok": 2}


def _fast(variant: str, model_type: str) -> dict[str, Any]:
    return {"model_type": model_type, **VARIANTS[variant][1]}


# name -> (architecture, its text part's keys beside the small sizes, its tower's keys)
TEXT_PARTS: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "gemma4": ("Gemma4ForConditionalGeneration", _fast("gemma4", "gemma4_text"), _GEMMA4),
    "gemma4_unified": (
        "Gemma4UnifiedForConditionalGeneration",
        _fast("gemma4_unified", "gemma4_unified_text"),
        None,
    ),
    "gemma3n": ("Gemma3nForConditionalGeneration", _fast("gemma3n", "gemma3n_text"), {}),
    "internvl": ("InternVLForConditionalGeneration", {"model_type": "qwen3", "head_dim": 16}, _INTERN),
    "internvl_moe": (
        "InternVLForConditionalGeneration",
        {"model_type": "qwen3_moe", "head_dim": 16, "norm_topk_prob": True, **_EXPERTS},
        _INTERN,
    ),
    "lfm2_vl": (
        "Lfm2VlForConditionalGeneration",
        {"model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True},
        _SIGLIP | {"model_type": "siglip2_vision_model"},
    ),
    "lfm3_vl": ("Lfm3VlForConditionalGeneration", {"model_type": "lfm3", **VARIANTS["lfm3"][1]}, _LFM3),
    "llama4": ("Llama4ForConditionalGeneration", _fast("llama4", "llama4_text"), _LLAMA4),
    "llava": ("LlavaForConditionalGeneration", {"model_type": "llama"}, _CLIP),
    "llava_next": ("LlavaNextForConditionalGeneration", {"model_type": "mistral"}, _CLIP),
    "llava_onevision": ("LlavaOnevisionForConditionalGeneration", {"model_type": "qwen2"}, _SIGLIP),
    "ministral3": (
        "Mistral3ForConditionalGeneration",
        {"model_type": "ministral3", **VARIANTS["ministral3"][1]},
        _PIXTRAL,
    ),
    "mistral4": ("Mistral3ForConditionalGeneration", _fast("mistral4", "mistral4"), _PIXTRAL),
    "qwen2_vl": (
        "Qwen2VLForConditionalGeneration",
        _AXES,
        {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 48, "mlp_ratio": 1},
    ),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _AXES, _QWEN),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _AXES3 | {"head_dim": 16}, _QWEN3),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", _AXES3 | _EXPERTS | {"head_dim": 16}, _QWEN3),
}


def save_text_part(path: Path, name: str) -> transformers.PreTrainedModel:
    """Write the whole model to a directory and return it: float32, in eval mode."""
    architecture, text, tower = TEXT_PARTS[name]
    if not hasattr(transformers, architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    model_class = getattr(transformers, architecture)
    text = deepcopy(SMALL | text)
    towers = {} if tower is None else {"vision_config": tower}
    config = model_class.config_class(text_config=text, tie_word_embeddings=text["tie_word_embeddings"], **towers)
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).float().eval()
        randomize(model)
    model.save_pretrained(path)
    return model
