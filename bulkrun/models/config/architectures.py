"""Which family a config.json belongs to: by architecture, model type, or its text part. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.family import Family

# architectures that hold a decoder beside towers for images and sound, which are left alone: by the model type of that
# decoder (any other may be another model), its architecture. The first one is meant where the file does not say.
_LLAVA = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_TEXT_PARTS: Mapping[str, Mapping[str, str]] = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma3nForConditionalGeneration": {"gemma3n_text": "Gemma3nForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4UnifiedForCausalLM"},
    "InternVLForConditionalGeneration": {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
    },
    "Lfm2VlForConditionalGeneration": {"lfm2": "Lfm2ForCausalLM"},
    "Lfm3VlForConditionalGeneration": {"lfm3": "Lfm3ForCausalLM"},
    "Llama4ForConditionalGeneration": {"llama4_text": "Llama4ForCausalLM"},
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaNextForConditionalGeneration": _LLAVA,
    "LlavaOnevisionForConditionalGeneration": _LLAVA,
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
    "Qwen2VLForConditionalGeneration": {"qwen2_vl_text": "Qwen2ForCausalLM"},
    "Qwen2_5_VLForConditionalGeneration": {"qwen2_5_vl_text": "Qwen2ForCausalLM"},
    "Qwen3VLForConditionalGeneration": {"qwen3_vl_text": "Qwen3ForCausalLM"},
    "Qwen3VLMoeForConditionalGeneration": {"qwen3_vl_moe_text": "Qwen3MoeForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
}
_ALWAYS = {"qwen3_vl_moe_text": {"norm_topk_prob": True}}  # keys that the decoder knows and the file lacks
# sizes that published files leave out where they are these, transformers' own
_SIZES_OF_7B = {"vocab_size": 32_000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_LEFT_OUT = {
    "llama": _SIZES_OF_7B | {"intermediate_size": 11_008},
    "mistral": _SIZES_OF_7B | {"intermediate_size": 14_336},
}
_FAMILY_NAMES = {name.lower(): name for name in FAMILIES}  # the first of them wrote LLaMAForCausalLM
_OTHER_PARTS = ("vision_config", "audio_config", "text_config")
_OF_THE_WHOLE = ("eos_token_id", "tie_word_embeddings")


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parsed config.json as that of its text part, where that is known; else as it is, the same object."""
    text = raw.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ModelError(f"key 'text_config' is {text!r}, not an object; download the model again")
    for name in raw.get("architectures") or ():
        parts = _TEXT_PARTS.get(name, {})
        kind = text.get("model_type") or next(iter(parts), None)
        if isinstance(kind, str) and kind in parts:
            # of ends of an output the text part's own do not know that of a turn; heads are tied or not as a whole
            whole = {key: raw[key] for key in _OF_THE_WHOLE if raw.get(key) is not None}
            merged = {**_LEFT_OUT.get(kind, {}), **raw, **text, **whole, **_ALWAYS.get(kind, {})}
            merged["architectures"] = [parts[kind]]
            return {key: _of_text(value) for key, value in merged.items() if key not in _OTHER_PARTS}
    return raw


def _of_text(value: Any) -> Any:
    """A key's value; of RoPE over several axes (mrope) what holds where a token is at one position on all of them."""
    is_of_axes = isinstance(value, Mapping) and "mrope_section" in value
    if not is_of_axes:
        return value
    plain = {name: one for name, one in value.items() if not name.startswith("mrope_")}
    return {name: "default" if one == "mrope" else one for name, one in plain.items()}


def refuse_other_parts(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that sees or hears and that `text_part` does not know."""
    name = str(next(iter(raw.get("architectures") or ()), raw.get("model_type")))
    if name.endswith("ForConditionalGeneration") or any(raw.get(key) for key in _OTHER_PARTS):
        kinds = _TEXT_PARTS.get(name)
        if kinds is None:
            fix = f"these run as text: {', '.join(_TEXT_PARTS)}"
        else:
            given = (raw.get("text_config") or {}).get("model_type")
            fix = f"the model type of its text_config is {given!r}, and those that run as text are {', '.join(kinds)}"
        raise ModelError(f"architecture {name} is not supported: a model with a vision or audio part; {fix}")


def find_family(raw: Mapping[str, Any]) -> tuple[str, Family] | None:
    """The architecture of a parsed config.json and its row, or None where it has none.

    A file that names no architecture, or the body alone (LlamaModel), may be of a whole model: its tensors will tell.
    """
    names = raw.get("architectures") or ()
    for given in names:
        if name := _FAMILY_NAMES.get(str(given).lower()):
            return name, FAMILIES[name]
    for name, family in FAMILIES.items():
        body = name.removesuffix("ForCausalLM")
        if raw.get("model_type") == family.model_type and {*names} <= {f"{body}Model", f"{body}TextModel"}:
            return name, family
    return None
