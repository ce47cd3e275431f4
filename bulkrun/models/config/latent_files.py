"""config.json of families with latent attention: what it may say, and how that is put in common words. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.expert_files import of_routed_experts, with_dense_layers
from bulkrun.models.config.family import IN_GROUPS, check_number, layers_of
from bulkrun.models.config.rope import mscale, rope_keys

_Keys = Mapping[str, Any]
_NO_ROPE: _Keys = {}
# keys of the files, with what holds where one is missing, and keys that are made of them
LATENT_KEYS: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "attention_bias": False,
    "attention_multiplier": 1.0,
    "rope_interleave": True,
}
EXPERT_KEYS: dict[str, Any] = {
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "shared_expert_intermediate_size": 2048,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "use_expert_bias": False,
    "mlp_only_layers": None,
    **IN_GROUPS,
}
DEEPSEEK_V2_KEYS = LATENT_KEYS | EXPERT_KEYS | {
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "first_k_dense_replace": 0,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "norm_topk_prob": False,
    "group_experts_counted": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "mlp_bias": False,
}  # fmt: skip
DEEPSEEK_V3_KEYS = LATENT_KEYS | EXPERT_KEYS | {
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "use_expert_bias": True,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 4096,
}  # fmt: skip
GLM_LITE_KEYS = LATENT_KEYS | EXPERT_KEYS | {
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "scoring_func": "sigmoid",
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "routed_scaling_factor": 1.8,
    "use_expert_bias": True,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "max_position_embeddings": 202_752,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
MISTRAL4_KEYS = LATENT_KEYS | EXPERT_KEYS | {
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "scoring_func": "softmax",
    "num_experts_per_tok": 4,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "max_position_embeddings": 1_048_576,
    "grows_queries": True,
}  # fmt: skip
MISTRAL4_ROPE: _Keys = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
MINICPM3_KEYS = LATENT_KEYS | {
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,  # hidden_size / num_attention_heads
    "rope_interleave": False,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "mlp_bias": False,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
YOUTU_KEYS = LATENT_KEYS | {"max_position_embeddings": 131_072, "tie_word_embeddings": True}


def of_deepseek_v2(raw: _Keys) -> _Keys:
    """DeepSeek V2: experts are of some groups alone where `topk_method` says so.

    Raises ModelError for weights that are made to sum to 1, which no published file asks for.
    """
    keys = _of_experts(of_latents({**DEEPSEEK_V2_KEYS, **raw}), DEEPSEEK_V2_KEYS)
    if keys["norm_topk_prob"]:
        raise ModelError("norm_topk_prob true is not supported; false is")
    if keys["topk_method"] not in ("greedy", "group_limited_greedy"):
        raise ModelError(f"topk_method {keys['topk_method']!r} is not supported; greedy and group_limited_greedy are")
    return keys if keys["topk_method"] == "group_limited_greedy" else {**keys, "n_group": 1, "topk_group": 1}


def of_deepseek_v3(raw: _Keys) -> _Keys:
    """DeepSeek V3, R1; Moonlight, Kimi K2."""
    return _of_experts(of_latents({**DEEPSEEK_V3_KEYS, **raw}), DEEPSEEK_V3_KEYS)


def of_glm_lite(raw: _Keys) -> _Keys:
    """GLM-4.7-Flash: dense layers may be told by a list."""
    return with_dense_layers(_of_experts(of_latents({**GLM_LITE_KEYS, **raw}), GLM_LITE_KEYS))


def of_mistral4(raw: _Keys) -> _Keys:
    """Mistral Small 4: its share of dimensions that turn is one of whole heads; here those that turn are apart."""
    rope = {**(raw.get("rope_parameters") or {})}
    rope.pop("partial_rotary_factor", None)
    keys = of_latents({**MISTRAL4_KEYS, **raw, "rope_parameters": rope}, MISTRAL4_ROPE)
    return _of_experts(keys, MISTRAL4_KEYS)


def of_minicpm3(raw: _Keys) -> _Keys:
    """MiniCPM3: embeddings, what layers add and logits are scaled, by other words than Granite's."""
    keys = of_latents({**MINICPM3_KEYS, **raw})
    depth, base = raw.get("scale_depth", 1.4), raw.get("dim_model_base", 256)
    for name, value in (("scale_depth", depth), ("dim_model_base", base)):
        if value is not None:
            check_number(name, value, float)
    return {
        **keys,
        "v_head_dim": keys["v_head_dim"] or raw["hidden_size"] // raw["num_attention_heads"],
        "embedding_multiplier": raw.get("scale_emb", 12),
        "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(len(layers_of(raw))),
        "logits_scaling": 1.0 if base is None else raw["hidden_size"] / base,
    }


def of_youtu(raw: _Keys) -> _Keys:
    """Youtu-LLM."""
    return of_latents({**YOUTU_KEYS, **raw})


def of_latents(keys: _Keys, default_rope: _Keys = _NO_ROPE) -> dict[str, Any]:
    """Heads as the cache has them: one key of a token, the part that turns and then its latent.

    yarn scales scores too where the file has `mscale_all_dim`.
    """
    names = ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank")
    for name in names:
        check_number(name, keys[name], int)
    nope, turning, latent = (keys[name] for name in names)
    if turning % 2:
        raise ModelError(f"qk_rope_head_dim {turning} is not supported; it must be even")
    return {
        **keys,
        "num_key_value_heads": 1,
        "head_dim": turning + latent,
        "attention_multiplier": _scores_scale(rope_keys(keys, default_rope)) / math.sqrt(nope + turning),
    }


def _scores_scale(rope: _Keys) -> float:
    kind, weight = rope.get("rope_type") or rope.get("type") or "default", rope.get("mscale_all_dim")
    return 1.0 if kind == "default" or not weight else mscale(rope["factor"], weight) ** 2


def _of_experts(keys: dict[str, Any], known: _Keys) -> dict[str, Any]:
    """Raises ModelError for what no published file asks for."""
    for name, expected in {"scoring_func": known["scoring_func"], "moe_layer_freq": 1}.items():
        if keys.get(name, expected) != expected:
            raise ModelError(f"{name} {keys[name]!r} is not supported; {expected} is")
    return of_routed_experts(keys)
