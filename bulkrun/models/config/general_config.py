"""What config.json says of a model outside the decoder's families: its sizes, or why it can not run.

Torch-free but for architectures that were not tried here: whether transformers has them is asked of it. Whether their
attention can be exchanged is only known when they are loaded (`general`). Knows the names that older architectures have
for their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.architectures import refuse_other_parts
from bulkrun.models.config.layer_kv import layers_kv
from bulkrun.models.config.rope import max_positions, rope_keys
from bulkrun.models.config.stored_quantization import refuse_quantized

# compared with transformers' own generate in the tests; any other decoder of transformers is checked when it loads
TRIED: Mapping[str, str] = {
    "AXK1ForCausalLM": "A.X K1",
    "Apertus1p5TextForCausalLM": "Apertus 1.5",
    "BeamForCausalLM": "Beam 1.0",
    "BioGptForCausalLM": "BioGPT",
    "CTRLLMHeadModel": "CTRL",
    "DbrxForCausalLM": "DBRX",
    "GPT2LMHeadModel": "GPT-2",
    "GPTBigCodeForCausalLM": "StarCoder, SantaCoder",
    "JetMoeForCausalLM": "JetMoE",
    "Kolibri1ForCausalLM": "Kolibri 1",
    "LagunaForCausalLM": "Laguna",
    "LongcatFlashForCausalLM": "LongCat-Flash",
    "MiMoV2FlashForCausalLM": "MiMo-V2-Flash",
    "ModernBertDecoderForCausalLM": "ModernBERT Decoder, Ettin (decoders)",
    "OPTForCausalLM": "OPT",
    "PersimmonForCausalLM": "Persimmon",
    "PhimoeForCausalLM": "Phi-3.5-MoE",
}

# kind of model -> (architectures, why it cannot run)
UNSUPPORTED: Mapping[str, tuple[str, str]] = {
    "encoder-decoder": ("T5, BART, Whisper ...", "a second attention over another sequence"),
    "state space, recurrent, hybrid": (
        "RWKV, Zamba, RecurrentGemma, xLSTM ...",
        "a state of another kind than those of Qwen3.5, LFM2, Granite 4.0 and Jamba",
    ),
    "sparse attention": (
        "DeepSeek V3.2 and V4, GLM-5, MiniMax M3 ...",
        "attention to tokens that are picked for each one",
    ),
    "vision or audio beside text": (
        "GLM-4.6V, Voxtral, Qwen3-Omni ...",
        "prompts are text; run as text: Gemma 3, 3n and 4, Llama 4, Mistral, Qwen-VL, InternVL, LLaVA",
    ),
    "attention of their own": (
        "BLOOM, MPT, Falcon with ALiBi, GPT-Neo, Doge, HRM",
        "transformers cannot exchange it",
    ),
    "quantized checkpoints": (
        "bitsandbytes, NVFP4, GGUF, MXFP4 of others than gpt-oss ...",
        "use the bfloat16 or float16 one (fast ones: or fp8, int8, GPTQ, AWQ)",
    ),
    "code in the checkpoint": ("whatever needs trust_remote_code", "nothing is executed from weights"),
}

# found out by loading them; named here so that a job is refused before any work
_OWN_ATTENTION = (
    "BloomForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM",
    "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM", "HrmTextForCausalLM", "MptForCausalLM", "OpenAIGPTLMHeadModel",
    "XGLMForCausalLM",
)  # fmt: skip

# encoders that can be decoders as well, where config.json says so
_ENCODERS = (
    "BertLMHeadModel", "BigBirdForCausalLM", "CamembertForCausalLM", "Data2VecTextForCausalLM", "ElectraForCausalLM",
    "ErnieForCausalLM", "MegatronBertForCausalLM", "RemBertForCausalLM", "RoCBertForCausalLM", "RoFormerForCausalLM",
    "RobertaForCausalLM", "RobertaPreLayerNormForCausalLM", "XLMRobertaForCausalLM", "XLMRobertaXLForCausalLM",
    "XmodForCausalLM",
)  # fmt: skip

# by the beginnings of their names
_RECURRENT = ("RecurrentGemma", "Rwkv", "Zamba", "xLSTM")

_SIZE_NAMES: Mapping[str, tuple[str, ...]] = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size", "n_embd", "d_model", "dim"),
    "num_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
}
_KV_HEAD_NAMES = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads")
_MULTI_QUERY = "GPTBigCodeForCausalLM"  # one key head, unless the file says otherwise
_HEADS_OF_EXPERTS = "JetMoeForCausalLM"  # a token has its heads once for each of its experts
_INTERMEDIATE_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_STATE_SPACE_KEYS = ("ssm_cfg", "state_size", "mamba_d_state", "mamba_n_heads", "ssm_state_size", "lru_width")
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
CLASSIFIERS = "ForSequenceClassification"  # how their classes end
_DECODERS = ("ForCausalLM", "LMHeadModel")


def general_facts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a parsed config.json of the general path says, as `ModelConfig` names it. Raises ModelError."""
    refuse_impossible(raw)
    refuse_quantized(raw)
    sizes = sizes_of(raw)
    unlike = layers_kv(raw, sizes["num_layers"], sizes["num_kv_heads"], sizes["head_dim"])
    return sizes | {"unlike_layers": unlike}


def refuse_impossible(raw: Mapping[str, Any]) -> None:
    """Raise ModelError, naming what it is, for a model that a paged KV cache can not serve."""
    names = [str(name) for name in raw.get("architectures") or [raw.get("model_type", "unknown")]]
    shown = ", ".join(names)
    reason = next(chain(_reasons_of_layers(raw, names), _reasons_of_attention(raw, names)), None)
    if reason is not None:
        raise ModelError(f"architecture {shown} is not supported: {reason}")
    refuse_other_parts(raw)
    if not raw.get("architectures"):
        raise ModelError(
            f"config.json names no architectures, and model type {shown} alone does not tell; add the class that the "
            'weights are of, such as "architectures": ["StableLmForCausalLM"]'
        )
    if any(name.endswith(CLASSIFIERS) for name in names):
        raise ModelError(f"architecture {shown} makes labels of texts and writes none; write task: classify")
    if not any(name.endswith(_DECODERS) for name in names):
        raise ModelError(f"architecture {shown} is not supported; decoders that generate text are (`bulkrun models`)")
    if not any(name in TRIED for name in names):
        refuse_unknown(raw, shown)


def refuse_unknown(raw: Mapping[str, Any], shown: str) -> None:
    """Raise ModelError for a model type that transformers does not have: what comes with it could run it alone."""
    from transformers import CONFIG_MAPPING, __version__  # slow to import (torch comes with it), and asked of few

    kind = raw.get("model_type")
    if kind is None or kind in CONFIG_MAPPING:
        return
    missing = f"architecture {shown} is not supported: transformers {__version__} has no model type {kind!r}"
    if raw.get("auto_map"):
        missing += ", and the code that comes with the checkpoint (auto_map in config.json) is never run"
    raise ModelError(
        f"{missing}; take a conversion of it to an architecture that is (`bulkrun models`; many are Llama's), a newer "
        "transformers if that has it, or another model"
    )


def _reasons_of_layers(raw: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    """Why its layers are not all decoder layers of attention."""
    if raw.get("is_encoder_decoder"):
        yield "an encoder-decoder; decoder-only models are"
    named = {str(kind) for kind in raw.get("layer_types") or ()}
    others = sorted(named - {*_ATTENTION_KINDS})
    if any(raw.get(key) for key in _STATE_SPACE_KEYS):
        yield "layers that keep a state; models of attention only are"
    if others:
        yield f"layers of type {', '.join(others)}; {' and '.join(_ATTENTION_KINDS)} are"
    if any(name.startswith(_RECURRENT) for name in names):
        yield "a recurrent model; models of attention only are"


def _reasons_of_attention(raw: Mapping[str, Any], names: list[str]) -> Iterator[str]:
    """Why its attention is not the one over a paged cache."""
    if any(name in _ENCODERS for name in names) and not raw.get("is_decoder"):
        yield "an encoder unless config.json has is_decoder: true"
    if any(name in _OWN_ATTENTION for name in names):
        yield "transformers cannot exchange its attention for ours"
    if raw.get("index_topk") or raw.get("sparse_attention_config"):
        yield "sparse attention, which picks the tokens it looks at"
    if raw.get("use_bidirectional_attention") in (True, "all"):
        yield "use_bidirectional_attention makes it an encoder"
    if raw.get("attention_chunk_size"):
        yield f"attention within chunks of {raw['attention_chunk_size']} tokens"


def sizes_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of `ModelConfig`. Raises ModelError, with the names they may have, for one that is missing."""
    sizes = {size: _first(raw, names) for size, names in _SIZE_NAMES.items()}
    for size, names in _SIZE_NAMES.items():
        if sizes[size] is None:
            raise ModelError(
                f"architecture {raw['architectures'][0]} is not supported: config.json has none of {', '.join(names)}, "
                "a size that is needed"
            )
    sizes["max_position_embeddings"] = max_positions(rope_keys(raw), sizes["max_position_embeddings"])
    kv_heads, head_dim = _key_heads(raw)
    return sizes | {
        "architecture": raw["architectures"][0],
        "num_kv_heads": kv_heads or sizes["num_heads"],
        "head_dim": head_dim or sizes["hidden_size"] // sizes["num_heads"],
        "intermediate_size": _first(raw, _INTERMEDIATE_NAMES) or 4 * sizes["hidden_size"],
    }


def _key_heads(raw: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """The heads of keys and their dimensions, None for those of queries and for hidden_size over heads."""
    if raw.get("kv_lora_rank"):  # latent attention: transformers makes whole keys and values of the latents
        return None, raw.get("qk_nope_head_dim", 0) + raw.get("qk_rope_head_dim", 0)
    if raw["architectures"][0] == _HEADS_OF_EXPERTS:
        return _first(raw, _KV_HEAD_NAMES) * raw.get("num_experts_per_tok", 2), raw.get("kv_channels")
    is_multi_query = raw.get("multi_query", raw["architectures"][0] == _MULTI_QUERY)
    heads = 1 if is_multi_query else _first({**(raw.get("attn_config") or {}), **raw}, _KV_HEAD_NAMES)
    return heads, raw.get("head_dim")


def _first(raw: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((raw[name] for name in names if raw.get(name) is not None), None)
