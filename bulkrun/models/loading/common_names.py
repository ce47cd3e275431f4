"""Tensor names of families that call the parts of a model otherwise, as the others call them."""

from __future__ import annotations

import re
from collections.abc import Mapping

_LFM = {
    "embedding_norm": "norm",
    "operator_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}
_LFM2 = _LFM | {
    "ffn_norm": "post_attention_layernorm",
    "self_attn.out_proj": "self_attn.o_proj",
    "q_layernorm": "q_norm",
    "k_layernorm": "k_norm",
    "feed_forward": "mlp",
}
_LFM3 = _LFM | {
    "post_operator_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffn_norm": "post_feedforward_layernorm",
    "self_attn.gate_proj": "self_attn.g_proj",
}
_GRANITE = {
    "block_sparse_moe.input_linear.weight": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "mlp.experts.down_proj",
    "block_sparse_moe.router.layer": "mlp.gate",
    "shared_mlp.input_linear": "shared_mlp.gate_up_proj",
    "shared_mlp.output_linear": "shared_mlp.down_proj",
}
_GRANITE_SWASH = _GRANITE | {"block_sparse_moe.experts": "mlp.experts", "block_sparse_moe.router": "mlp.gate"}
_BAMBA = {
    "pre_ff_layernorm": "post_attention_layernorm",
    "feed_forward": "mlp",
    "final_layernorm": "norm",
}
_MAMBA = {
    "backbone.embeddings": "model.embed_tokens",
    "backbone.embedding": "model.embed_tokens",
    "backbone.norm_f": "model.norm",
    "backbone": "model",
    "embeddings": "embed_tokens",
    "embedding": "embed_tokens",
    "norm_f": "norm",
}
_JAMBA = _BAMBA | {"router": "gate"}
_ERNIE_MOE = {
    "gate.moe_statics.e_score_correction_bias": "expert_bias",
    "moe_statics.e_score_correction_bias": "expert_bias",
}
_SCORE_BIAS = {"gate.e_score_correction_bias": "expert_bias"}
_SCORE_BIAS_BESIDE = _SCORE_BIAS | {"e_score_correction_bias": "expert_bias"}  # the router, in published files
_MINIMAX = {
    "block_sparse_moe.e_score_correction_bias": "mlp.expert_bias",
    "e_score_correction_bias": "expert_bias",
}
_HUNYUAN3 = {
    "router.gate": "gate",
    "shared_mlp": "shared_experts",
    "e_score_correction_bias": "expert_bias",
}
_AFMOE = {
    "router.gate": "gate",
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_APERTUS = {
    "attention_layernorm": "input_layernorm",
    "feedforward_layernorm": "post_attention_layernorm",
}
_HYPERCLOVAX = {
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_norm1": "post_attention_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
_HUNYUAN = {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}
_GLM4 = {
    "post_self_attn_layernorm": "post_attention_layernorm",
    "post_attention_layernorm": "pre_feedforward_layernorm",
    "post_mlp_layernorm": "post_feedforward_layernorm",
}
_OLMO_HYBRID = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
}
_NEMOTRON = _MAMBA | {"gate.e_score_correction_bias": "expert_bias"}
_PLAIN_BLOCKS = {
    "query_key_value": "qkv_proj",
    "dense": "o_proj",
    "dense_h_to_4h": "up_proj",
    "dense_4h_to_h": "down_proj",
}
_GPT_NEOX = _PLAIN_BLOCKS | {
    "gpt_neox.embed_in": "model.embed_tokens",
    "gpt_neox.final_layer_norm": "model.norm",
    "gpt_neox": "model",
    "embed_in": "embed_tokens",
    "final_layer_norm": "norm",
    "attention": "self_attn",
    "embed_out": "lm_head",
}
_FALCON = _PLAIN_BLOCKS | {
    "transformer.word_embeddings": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h": "model.layers",
    "word_embeddings": "embed_tokens",
    "ln_f": "norm",
    "h": "layers",
    "self_attention": "self_attn",
    "ln_attn": "input_layernorm",
    "ln_mlp": "post_attention_layernorm",
}
_GPT_J = {
    "transformer.wte": "model.embed_tokens",
    "transformer.ln_f": "model.norm",
    "transformer.h": "model.layers",
    "wte": "embed_tokens",
    "ln_f": "norm",
    "h": "layers",
    "ln_1": "input_layernorm",
    "attn": "self_attn",
    "out_proj": "o_proj",
    "fc_in": "up_proj",
    "fc_out": "down_proj",
}
_PHI = {"final_layernorm": "norm", "dense": "o_proj", "fc1": "up_proj", "fc2": "down_proj"}
_STABLELM = {"q_layernorm": "q_norm", "k_layernorm": "k_norm"}
_LLAMA4 = {"feed_forward": "mlp", "router": "gate"}
_GEMMA4 = {"experts": "mlp.experts", "router.proj": "mlp.gate", "router": "mlp.router"}
# by architecture: whole parts of dotted names, longer ones first
_COMMON_NAMES: Mapping[str, Mapping[str, str]] = {
    "AfmoeForCausalLM": _AFMOE,
    "ApertusForCausalLM": _APERTUS,
    "BambaForCausalLM": _BAMBA,
    "Dots1ForCausalLM": _SCORE_BIAS,
    "ExaoneMoeForCausalLM": _SCORE_BIAS_BESIDE,
    "FlintForCausalLM": {"softmax_offset": "sinks"},
    "Ernie4_5_MoeForCausalLM": _ERNIE_MOE,
    "FalconForCausalLM": _FALCON,
    "FalconH1ForCausalLM": _BAMBA,
    "FalconMambaForCausalLM": _MAMBA,
    "GPTJForCausalLM": _GPT_J,
    "GPTNeoXForCausalLM": _GPT_NEOX,
    "Gemma4ForCausalLM": _GEMMA4,
    "Glm4ForCausalLM": _GLM4,
    "CodeGenForCausalLM": _GPT_J,
    "DeepseekV3ForCausalLM": _SCORE_BIAS,
    "Glm4MoeForCausalLM": _SCORE_BIAS,
    "Glm4MoeLiteForCausalLM": _SCORE_BIAS,
    "GraniteMoeForCausalLM": _GRANITE,
    "GraniteMoeHybridForCausalLM": _GRANITE,
    "GraniteMoeSharedForCausalLM": _GRANITE,
    "GraniteMoeSWAForCausalLM": _GRANITE_SWASH,
    "HYV3ForCausalLM": _HUNYUAN3,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "HunYuanMoEV1ForCausalLM": _HUNYUAN | {"gate.wg": "gate"},
    "HyperCLOVAXForCausalLM": _HYPERCLOVAX,
    "JambaForCausalLM": _JAMBA,
    "KimiLinearForCausalLM": _SCORE_BIAS | {"block_sparse_moe": "mlp", "self_attn.forget_gate": "self_attn"},
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm3ForCausalLM": _LFM3,
    "Mamba2ForCausalLM": _MAMBA,
    "MambaForCausalLM": _MAMBA,
    "Llama4ForCausalLM": _LLAMA4,
    "MiniMaxM2ForCausalLM": _MINIMAX,
    "NanoChatForCausalLM": {"fc1": "up_proj", "fc2": "down_proj"},
    "NemotronHForCausalLM": _NEMOTRON,
    "OlmoHybridForCausalLM": _OLMO_HYBRID,
    "PhiForCausalLM": _PHI,
    "SolarOpenForCausalLM": _SCORE_BIAS,
    "StableLmForCausalLM": _STABLELM,
    "Starcoder2ForCausalLM": {"c_fc": "up_proj", "c_proj": "down_proj"},
    "VaultGemmaForCausalLM": {"pre_feedforward_layernorm": "post_attention_layernorm"},
}


def common_name(name: str, architecture: str) -> str:
    """A tensor's or a module's name as Llama's, Qwen's and Mixtral's files have it."""
    names = _COMMON_NAMES.get(architecture, {})
    if not names:
        return name
    pattern = "|".join(re.escape(part) for part in names)
    return re.sub(rf"(?<![^.])({pattern})(?![^.])", lambda match: names[match[1]], name)
