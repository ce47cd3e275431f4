"""The mixture of experts that a config.json asks for. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from bulkrun.errors import ModelError
from bulkrun.models.config.family import Family, Scores, check_number


class ExpertGroups(NamedTuple):
    """Experts in groups of one size: a token goes to experts of the best groups alone (DeepSeek-V2, section 2.2.2)."""

    num_groups: int
    num_kept: int
    num_counted: int  # a group is as good as so many of its best experts are together


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
    averages_shared: bool = False  # half of what it finds is added to half of what the others find
    routes_in_float32: bool = False
    scores: Scores = "softmax"
    weighs_inputs: bool = False  # what goes into experts, and not what comes out
    has_score_bias: bool = False  # which chooses experts and does not weigh them
    weights_scale: float = 1.0
    groups: ExpertGroups | None = None
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
        averages_shared=bool(keys.get("averages_shared_expert")),
        routes_in_float32=family.routes_in_float32,
        scores=keys.get("expert_scores", family.expert_scores),
        weighs_inputs=family.weighs_expert_inputs,
        has_score_bias=bool(keys.get("use_expert_bias")),
        weights_scale=float(keys.get("routed_scaling_factor", 1.0)),
        groups=_groups(keys, num_experts, num_chosen),
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


def _groups(keys: Mapping[str, Any], num_experts: int, num_chosen: int) -> ExpertGroups | None:
    """Raises ModelError for groups that are none, and for so few kept that a token finds too few experts in them."""
    num_groups, num_kept = keys.get("n_group") or 1, keys.get("topk_group") or 1
    for name, value in (("n_group", num_groups), ("topk_group", num_kept)):
        check_number(name, value, int)
    if num_groups == 1:
        return None
    size, num_counted = num_experts // num_groups, keys["group_experts_counted"]
    if num_experts % num_groups or num_kept > num_groups or size < num_counted or num_kept * size < num_chosen:
        raise ModelError(
            f"key 'n_group' is {num_groups} with topk_group {num_kept}, and {num_chosen} of {num_experts} experts are "
            "chosen, which does not go together; download the model again"
        )
    return ExpertGroups(num_groups, num_kept, num_counted)


def _shared_size(keys: Mapping[str, Any]) -> int | None:
    size: int | None = keys.get("shared_expert_intermediate_size")
    if size is None:
        return None
    check_number("shared_expert_intermediate_size", size, int)
    return size


def _swiglu(keys: Mapping[str, Any]) -> tuple[float, float] | None:
    if "swiglu_limit" not in keys:
        return None
    for name in ("swiglu_alpha", "swiglu_limit"):
        check_number(name, keys[name], float)
    return float(keys["swiglu_alpha"]), float(keys["swiglu_limit"])
