"""Tensor names of a mixture's experts: each expert's matrices by themselves, or all experts in one tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

import torch

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.sparse_mlp import SparseMLP
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.target import Target, places_of, weights_of, whole


class _ExpertNames(NamedTuple):
    block: str
    gate: str | None
    up: str
    down: str


_GATED = _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
_BY_NUMBER = _ExpertNames("mlp", "w1", "w3", "w2")
_OF_MIXTRAL = _BY_NUMBER._replace(block="block_sparse_moe")
_EXPERT_NAMES: Mapping[str, _ExpertNames] = {
    "KimiLinearForCausalLM": _BY_NUMBER,
    "Lfm2MoeForCausalLM": _BY_NUMBER,
    "NemotronHForCausalLM": _ExpertNames("mixer", None, "up_proj", "down_proj"),
    "MiniMaxM2ForCausalLM": _OF_MIXTRAL,
    "MixtralForCausalLM": _OF_MIXTRAL,
    "AfmoeForCausalLM": _GATED,
    "Cohere2MoeForCausalLM": _GATED,
    "DeepseekV2ForCausalLM": _GATED,
    "DeepseekV3ForCausalLM": _GATED,
    "Dots1ForCausalLM": _GATED,
    "Ernie4_5_MoeForCausalLM": _GATED,
    "ExaoneMoeForCausalLM": _GATED,
    "FlexOlmoForCausalLM": _GATED,
    "FlintForCausalLM": _GATED,
    "Glm4MoeForCausalLM": _GATED,
    "Glm4MoeLiteForCausalLM": _GATED,
    "HYV3ForCausalLM": _GATED,
    "HunYuanMoEV1ForCausalLM": _GATED,
    "JambaForCausalLM": _GATED,
    "Llama4ForCausalLM": _GATED,
    "MellumForCausalLM": _GATED,
    "Mistral4ForCausalLM": _GATED,
    "OlmoeForCausalLM": _GATED,
    "Qwen2MoeForCausalLM": _GATED,
    "Qwen3MoeForCausalLM": _GATED,
    "Qwen3NextForCausalLM": _GATED,
    "Qwen3_5MoeForCausalLM": _GATED,
    "SolarOpenForCausalLM": _GATED,
}
_FUSED_EXPERTS = "mlp.experts."  # in transformers 5's own layout, of all architectures: all experts in one tensor
_BY_COLUMNS = ("Llama4ForCausalLM",)  # of such tensors, in files of every version
_INTERLEAVED_EXPERTS = ("GptOssForCausalLM",)  # so too, each gate followed by its up
PACKED_EXPERTS = "_blocks"  # behind the name of experts' weights in MXFP4, whose rows are not columns then


def expert_modules(config: DecoderConfig) -> list[str]:
    """The matrices of a sparse layer's experts, such as mlp.experts.0.gate_proj; none where they are one tensor."""
    names = _EXPERT_NAMES.get(config.architecture)
    if config.moe is None or names is None:
        return []
    experts = [f"{names.block}.experts.{expert}" for expert in range(config.moe.num_experts)]
    return [f"{expert}.{name}" for expert in experts for name in names[1:] if name is not None]


def expert_targets(
    prefix: str, mlp: SparseMLP, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Target]]:
    """The router and the experts of the layer with this prefix, in the layout in which they are stored."""
    if config.architecture in _INTERLEAVED_EXPERTS:
        is_packed = f"{prefix}{_FUSED_EXPERTS}gate_up_proj{PACKED_EXPERTS}" in stored
        yield from _interleaved_expert_targets(prefix, mlp, is_packed=is_packed)
    elif f"{prefix}{_FUSED_EXPERTS}gate_up_proj" in stored or config.architecture not in _EXPERT_NAMES:
        down = stored.get(f"{prefix}{_FUSED_EXPERTS}down_proj")
        yield from _fused_expert_targets(prefix, mlp, by_columns=_lies_by_columns(down, mlp, config))
    else:
        yield from _expert_targets(prefix, mlp, config)


def _expert_targets(prefix: str, mlp: SparseMLP, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    names = _EXPERT_NAMES[config.architecture]
    yield f"{prefix}{names.block}.gate.weight", whole(mlp.router.weight)
    sizes = {name: mlp.moe.intermediate_size for name in (names.gate, names.up) if name is not None}
    for expert in range(mlp.moe.num_experts):
        of_expert = f"{prefix}{names.block}.experts.{expert}."
        gate_up, down = (places_of(one).each(itemgetter(expert)) for one in (mlp.gate_up_proj, mlp.down_proj))
        yield from weights_of(of_expert, gate_up, sizes)
        yield from weights_of(of_expert, down, {names.down: config.hidden_size})


def _lies_by_columns(down: StoredTensor | None, mlp: SparseMLP, config: DecoderConfig) -> bool:
    """Whether `down`, as it is stored, does (Qwen3-VL, Llama 4): then gate and up do so too."""
    if config.architecture in _BY_COLUMNS:
        return True
    _, num_outputs, num_inputs = places_of(mlp.down_proj).target().shape
    return down is not None and num_inputs != num_outputs and down.shape[1:] == (num_inputs, num_outputs)


def _fused_expert_targets(prefix: str, mlp: SparseMLP, *, by_columns: bool) -> Iterator[tuple[str, Target]]:
    """All experts in one tensor."""
    yield f"{prefix}mlp.gate.weight", whole(mlp.router.weight)
    for name, projection in (("gate_up_proj", mlp.gate_up_proj), ("down_proj", mlp.down_proj)):
        places = places_of(projection)
        target = places.target()
        if by_columns:
            num_experts, rows, columns = target.shape
            target = places.each(lambda places: places.transpose(1, 2)).target((num_experts, columns, rows))
        yield f"{prefix}{_FUSED_EXPERTS}{name}", target


def _interleaved_expert_targets(prefix: str, mlp: SparseMLP, *, is_packed: bool) -> Iterator[tuple[str, Target]]:
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    num_experts, hidden_size, size = places_of(down).target().shape
    assert mlp.router.bias is not None and gate_up.bias is not None and down.bias is not None, (
        "such experts have biases"
    )
    yield f"{prefix}mlp.router.weight", whole(mlp.router.weight)
    yield f"{prefix}mlp.router.bias", whole(mlp.router.bias)
    experts = f"{prefix}{_FUSED_EXPERTS}"

    def pairs(rows: torch.Tensor) -> torch.Tensor:  # [X, 2 I, ...] -> [X, I, 2, ...]
        return rows.unflatten(1, (2, size)).transpose(1, 2)

    if is_packed:
        rows = (num_experts, 2 * size, hidden_size)
        yield f"{experts}gate_up_proj{PACKED_EXPERTS}", places_of(gate_up).each(pairs).target(rows)
        yield f"{experts}down_proj{PACKED_EXPERTS}", places_of(down).target()
    else:
        columns = (num_experts, hidden_size, 2 * size), (num_experts, size, hidden_size)
        turned = places_of(gate_up).each(lambda places: pairs(places).permute(0, 3, 1, 2))
        yield f"{experts}gate_up_proj", turned.target(columns[0])
        yield f"{experts}down_proj", places_of(down).each(lambda places: places.transpose(1, 2)).target(columns[1])
    yield f"{experts}gate_up_proj_bias", Target(pairs(gate_up.bias.data), (num_experts, 2 * size))
    yield f"{experts}down_proj_bias", whole(down.bias)
