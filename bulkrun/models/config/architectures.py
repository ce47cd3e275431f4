"""Which family a config.json belongs to: by architecture, model type, or its text part. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bulkrun.errors import ModelError
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.family import Family


class _TextPart(NamedTuple):
    model_type: str  # any other may be another model: ministral3 scales its queries
    architecture: str


# architectures that hold one of the families beside a vision tower, which is left alone
_TEXT_PARTS: Mapping[str, _TextPart] = {
    "Gemma3ForConditionalGeneration": _TextPart("gemma3_text", "Gemma3ForCausalLM"),
    "Mistral3ForConditionalGeneration": _TextPart("mistral", "MistralForCausalLM"),
    "Qwen3_5ForConditionalGeneration": _TextPart("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForConditionalGeneration": _TextPart("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
# of the whole model where it says so: its text part does not know the end of a turn, nor whether files hold a head
_OF_WHOLE = ("eos_token_id", "tie_word_embeddings")
_FAMILY_NAMES = {name.lower(): name for name in FAMILIES}  # the first of them wrote LLaMAForCausalLM
_OTHER_PARTS = ("vision_config", "audio_config", "text_config")


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The parsed config.json as that of its text part, where that is one of the families; else as it is."""
    text = raw.get("text_config") or {}
    if not isinstance(text, Mapping):
        raise ModelError(f"key 'text_config' is {text!r}, not an object; download the model again")
    for name in raw.get("architectures") or ():
        part = _TEXT_PARTS.get(name)
        if part is not None and text.get("model_type", part.model_type) == part.model_type:
            whole = {key: raw[key] for key in _OF_WHOLE if raw.get(key) is not None}
            return {**raw, **text, **whole, "architectures": [part.architecture]}
    return raw


def refuse_other_parts(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a model that sees or hears and that `text_part` does not know."""
    name = str(next(iter(raw.get("architectures") or ()), raw.get("model_type")))
    if name.endswith("ForConditionalGeneration") or any(raw.get(key) for key in _OTHER_PARTS):
        known = ", ".join(f"{known} with a {part.model_type} text_config" for known, part in _TEXT_PARTS.items())
        raise ModelError(
            f"architecture {name} is not supported: a model with a vision or audio part; these run as text: {known}"
        )


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
