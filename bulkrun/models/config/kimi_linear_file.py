"""config.json of Kimi Linear, in words that families have in common. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.expert_files import of_routed_experts, with_dense_layers
from bulkrun.models.config.family import check_number, layers_of
from bulkrun.models.config.latent_files import EXPERT_KEYS, LATENT_KEYS, of_latents
from bulkrun.models.config.layer_kinds import of_layers

_Keys = Mapping[str, Any]
_FULL, _LINEAR = "full_attention", "linear_attention"
KIMI_LINEAR_KEYS: dict[str, Any] = LATENT_KEYS | EXPERT_KEYS | {
    "q_lora_rank": None,
    "rope_interleave": False,
    "position_embedding_type": "nope",
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 1024,
    "routed_scaling_factor": 2.446,
    "use_expert_bias": True,
    "linear_layers": None,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_num_key_heads": 32,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
_OTHER_NAMES = {  # of keys that DeepSeek's files have, and of those that transformers writes
    "num_local_experts": "n_routed_experts",
    "num_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "model_max_length": "max_position_embeddings",
}
_FIXED: _Keys = {
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "mla_use_output_gate": False,
    "routed_expert_hidden_size": None,
    "attn_res_block_size": None,
}
_FIXED_OF_LINEAR: _Keys = {"use_full_rank_gate": False, "gate_lower_bound": None}
_OF_LINEAR = {  # keys of `linear_attn_config`
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def of_kimi_linear(raw: _Keys) -> _Keys:
    """Kimi Linear: which layers attend is told by their numbers, from 1, or by a list; else each fourth does.

    Raises ModelError for what Kimi Linear has not: Kimi K3's text part names the same architecture.
    """
    linear = raw.get("linear_attn_config") or {}
    for given, fixed in ((raw, _FIXED), (linear, _FIXED_OF_LINEAR)):
        for name, expected in fixed.items():
            if given.get(name, expected) != expected:
                raise ModelError(f"{name} {given[name]!r} is not supported; {expected} is")
    keys = {**KIMI_LINEAR_KEYS, **raw}
    keys |= {ours: raw[theirs] for theirs, ours in _OTHER_NAMES.items() if raw.get(theirs) is not None}
    keys |= {ours: linear[theirs] for theirs, ours in _OF_LINEAR.items() if theirs in linear}
    keys |= _equal_heads(keys) | {"linear_layers": _linear_layers(raw, linear)}
    return with_dense_layers(of_routed_experts(of_latents(keys)))


def _equal_heads(keys: _Keys) -> dict[str, int]:
    """A delta net's heads of keys and of values, which are as many and of one size."""
    for name in ("linear_num_heads", "linear_head_dim"):
        check_number(name, keys[name], int)
    num_heads, head_dim = keys["linear_num_heads"], keys["linear_head_dim"]
    return {
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }


def _linear_layers(raw: _Keys, linear: _Keys) -> list[bool]:
    """Raises ModelError where none attends, or a layer is of another kind."""
    layers = layers_of(raw)
    kinds = [_FULL if layer and layer % 4 == 0 else _LINEAR for layer in layers]
    if raw.get("layer_types") is not None:
        kinds = of_layers(raw, "layer_types")
    elif "full_attn_layers" in linear and "kda_layers" in linear:
        kinds = [_FULL if layer + 1 in linear["full_attn_layers"] else _LINEAR for layer in layers]
    if not {*kinds} <= {_FULL, _LINEAR} or _FULL not in kinds:
        raise ModelError(f"layers {kinds} are not supported; some of {_FULL} and others of {_LINEAR} are")
    return [kind == _LINEAR for kind in kinds]
