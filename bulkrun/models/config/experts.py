"""The mixture of experts that a config.json asks for. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import Family, Scores, check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of a model's sparse layers."""

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    renormalize: bool  # the weights of a token's experts sum to 1
    sparse_layers: tuple[bool, ...]  # per layer; the others have a dense MLP
    has_biases: bool = False  # the router and the experts
    shared_size: int | None = None  # width of the expert that all tokens have
    gates_shared: bool = True  # it has a gate of its own
    routes_in_float32: bool = False
    scores: Scores = "softmax"
    has_score_bias: bool = False  # which chooses experts and does not weigh them
    weights_scale: float = 1.0
    beside_mlp: bool = False  # a dense MLP's output and the experts' are each normalized, and added up
    swiglu: tuple[float, float] | None = None  # alpha and limit (`ops.ClampedSwiglu`); None: SiLU


def moe_of(keys: Mapping[str, Any], family: Family) -> MoEConfig | None:
    """The mixture that the keys of a config.json ask for, if any. Raises ModelError for what cannot be one."""
    if not keys.get("num_experts"):
        return None
    num_experts, num_chosen = _num_experts(keys)
    for name in ("moe_intermediate_size", "decoder_sparse_step"):
        if name in keys:
            check_number(name, keys[name], int)
    size, step = keys.get("moe_intermediate_size", keys["intermediate_size"]), keys.get("decoder_sparse_step", 1)
    if size % 8 or keys["hidden_size"] % 8:
        raise ModelError(f"experts of {keys['hidden_size']} by {size} are not supported; multiples of 8 are")
    dense = keys.get("mlp_only_layers") or ()
    return MoEConfig(
        num_experts=num_experts,
        num_experts_per_tok=num_chosen,
        intermediate_size=size,
        renormalize=bool(keys.get("norm_topk_prob", True)),
        sparse_layers=tuple(
            layer not in dense and (layer + 1) % step == 0 for layer in range(keys["num_hidden_layers"])
        ),
        has_biases=family.has_expert_biases,
        gates_shared=family.gates_shared_expert,
        routes_in_float32=family.routes_in_float32,
        scores=family.expert_scores,
        has_score_bias=bool(keys.get("use_expert_bias")),
        weights_scale=float(keys.get("routed_scaling_factor", 1.0)),
        shared_size=_shared_size(keys),
        beside_mlp=bool(keys.get("experts_beside_mlp")),
        swiglu=_swiglu(keys),
    )


def _num_experts(keys: Mapping[str, Any]) -> tuple[int, int]:
    """Experts of a layer, and those of a token."""
    for name in ("num_experts", "num_experts_per_tok"):
        check_number(name, keys[name], int)
    num_experts, num_chosen = keys["num_experts"], keys["num_experts_per_tok"]
    if num_chosen > num_experts:
        raise ModelError(
            f"key 'num_experts_per_tok' is {num_chosen}, and there are {num_experts} experts; download the model again"
        )
    return num_experts, num_chosen


def _shared_size(keys: Mapping[str, Any]) -> int | None:
    if "shared_expert_intermediate_size" not in keys:
        return None
    size: int = keys["shared_expert_intermediate_size"]
    check_number("shared_expert_intermediate_size", size, int)
    return size


def _swiglu(keys: Mapping[str, Any]) -> tuple[float, float] | None:
    if "swiglu_limit" not in keys:
        return None
    for name in ("swiglu_alpha", "swiglu_limit"):
        check_number(name, keys[name], float)
    return float(keys["swiglu_alpha"]), float(keys["swiglu_limit"])
