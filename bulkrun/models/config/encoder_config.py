"""What config.json says of a model that makes hidden states of texts: sizes, or why it cannot be run here.

Torch-free but for model types that were not tried: whether transformers has them is asked of it. A decoder of the
engine's own families, causal or not, is a `DecoderConfig`; whatever else attends is a plain `ModelConfig`.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.architectures import find_family, refuse_other_parts, text_part
from bulkrun.models.config.common_facts import common_facts
from bulkrun.models.config.general_config import refuse_unknown, sizes_of
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.stored_quantization import refuse_quantized

# model type -> the published models that are of it; their vectors are compared with transformers' own in the tests
TRIED_ENCODERS: Mapping[str, str] = {
    "bert": "BERT, MiniLM, BGE, E5, GTE, mxbai-embed",
    "distilbert": "DistilBERT",
    "gemma3_text": "EmbeddingGemma",
    "modernbert": "ModernBERT, gte-modernbert, nomic modernbert-embed",
    "mpnet": "MPNet",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-RoBERTa, BGE-M3, multilingual E5",
}
# their positions are counted from the id of the padding token, which config.json may leave to its default of 1
_COUNTS_FROM_PADDING = (
    "camembert", "data2vec-text", "ibert", "lilt", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm",
    "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip


def text_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a parsed config.json: a DecoderConfig for a decoder of the families, else a plain one.

    Raises ModelError for what cannot make hidden states of a text here, KeyError for a missing size.
    """
    whole, raw = raw, text_part(raw)
    found = find_family(raw)
    if found is not None and not looks_both_ways(raw):
        return DecoderConfig.of_family(*found, raw)
    if raw.get("is_encoder_decoder"):
        raise ModelError(
            f"architecture {_name(raw)} is not supported: an encoder-decoder; models that are an encoder or a decoder "
            "alone are"
        )
    if raw is not whole:  # transformers' code would run with all of its parts
        raise ModelError(
            f"architecture {_name(whole)} makes no vectors here: its text part looks both ways (is_causal or "
            "use_bidirectional_attention in config.json), and stands beside a vision or audio part; take a model of "
            "text alone"
        )
    refuse_other_parts(raw)
    refuse_quantized(raw)
    _refuse_changing_attention(raw)
    if found is not None:
        with suppress(ModelError):  # what the decoder cannot do, transformers' code may
            return DecoderConfig.of_family(*found, raw, is_causal=False)
    if raw.get("model_type") not in TRIED_ENCODERS:
        refuse_unknown(raw, _name(raw))
    if raw.get("auto_map"):
        _refuse_own_class(_name(raw))
    sizes = sizes_of({**raw, "architectures": [_name(raw)]})
    sizes["max_position_embeddings"] -= _unused_positions(raw)
    return ModelConfig(**sizes, **common_facts(raw))


def _refuse_changing_attention(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for BigBird's blocks: from the first short text on transformers' code attends to all tokens."""
    if raw.get("model_type") == "big_bird" and raw.get("attention_type", "block_sparse") != "original_full":
        raise ModelError(
            f"architecture {_name(raw)} is not supported with attention_type block_sparse: what a text gives would "
            "depend on those before it; set attention_type to original_full in config.json, for attention to all tokens"
        )


def _refuse_own_class(name: str) -> None:
    """Raise ModelError where the class is the checkpoint's own: under a known type it may compute other things."""
    import transformers  # slow to import (torch comes with it), and asked of few

    if not hasattr(transformers, name):
        raise ModelError(
            f"architecture {name} is not supported: its code comes with the checkpoint (auto_map in config.json) and "
            "is never run; take another model"
        )


def looks_both_ways(raw: Mapping[str, Any]) -> bool:
    """Whether config.json says of a decoder that its attention sees later tokens as well, as encoders' does."""
    return bool(raw.get("use_bidirectional_attention")) or raw.get("is_causal") is False


def _name(raw: Mapping[str, Any]) -> str:
    return str(next(iter(raw.get("architectures") or ()), raw.get("model_type", "unknown")))


def _unused_positions(raw: Mapping[str, Any]) -> int:
    """Positions of the table that no token has."""
    if raw.get("model_type") not in _COUNTS_FROM_PADDING:
        return 0
    padding = raw.get("pad_token_id")
    return 1 + (1 if padding is None or raw["model_type"] == "mpnet" else int(padding))
