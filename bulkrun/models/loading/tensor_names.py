"""Hugging Face's tensor names of every family, and where each goes in the decoder's fused parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import nn

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.decoder_layer import Attention, DecoderLayer
from bulkrun.models.decoder.gated_delta_net import GatedDeltaNet
from bulkrun.models.decoder.layers import MLP, ExpertLinear, HeadQKNorm, Linear, ProjectionQKNorm, RMSNorm, SparseMLP
from bulkrun.models.decoder.quantized_layers import FourBitWeights, QuantizedLinear
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.row_orders import BY_KEY_HEAD, ba_order, gates_first, qkvz_order


@dataclass(frozen=True, slots=True)
class Target:
    """Where one checkpoint tensor goes: a view of a parameter, broadcast over heads for the q and k norms.

    A view of as many numbers in other dimensions takes them in the tensor's order.
    """

    view: torch.Tensor
    shape: tuple[int, ...]  # what the checkpoint must hold
    offset: float = 0.0  # added to what it holds
    scale: torch.Tensor | None = None  # of each row, float32, where the view is quantized: its shape, but 1 for a row
    zero: torch.Tensor | None = None  # of codes: where their zero points go
    order: torch.Tensor | None = None  # int64: which of the tensor's rows each row of the view takes; None: its own

    def ordered(self, rows: torch.Tensor) -> torch.Tensor:
        """What a tensor holds for its rows, as the view has them."""
        return rows if self.order is None else rows[self.order.to(rows.device)]

    @property
    def takes_codes(self) -> bool:
        """Whether the view is of codes of four bits, two to a byte, with scales of groups of inputs."""
        return self.view.dtype == torch.uint8

    def store_scales(self, scale: torch.Tensor, zero: torch.Tensor | None) -> None:
        """Put the scales and zero points of codes in their places: as many numbers, in the view's order."""
        assert self.scale is not None, "codes mean nothing without"
        self.scale.copy_(scale.reshape(self.scale.shape))
        if self.zero is not None and zero is not None:
            self.zero.copy_(zero.reshape(self.zero.shape))


class _Places(NamedTuple):
    """The parts of a projection's weight, with the rows of outputs in the same dimensions."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    zero: torch.Tensor | None
    numbers: int  # in each item of the weight

    def each(self, choose: Callable[[torch.Tensor], torch.Tensor]) -> _Places:
        """What is chosen of every part."""
        scale, zero = (None if part is None else choose(part) for part in self[1:3])
        return _Places(choose(self.weight), scale, zero, self.numbers)

    def target(self, shape: tuple[int, ...] | None = None, order: torch.Tensor | None = None) -> Target:
        """Where a tensor of this shape goes, or one of the weight's own, whose rows it may have in another order."""
        own = (*self.weight.shape[:-1], self.weight.shape[-1] * self.numbers)
        return Target(self.weight, shape or own, scale=self.scale, zero=self.zero, order=order)


_Orders = Mapping[str, torch.Tensor]  # of the rows of a projection's parts, by their names
_AS_STORED: _Orders = {}


class _ExpertNames(NamedTuple):
    block: str
    gate: str
    up: str
    down: str


HEAD_MODULE = "lm_head."
SCORE = "score.weight"  # of decoders that classify
OF_HEADS = (HEAD_MODULE, "score.")  # what is left out where hidden states are wanted alone
EMBEDDING, HEAD = "model.embed_tokens.weight", f"{HEAD_MODULE}weight"
_FUSED_IN_CHECKPOINT = ("Phi3ForCausalLM",)  # q, k, v in one tensor, gate and up in another
_EXPERT_NAMES: Mapping[str, _ExpertNames] = {
    "MixtralForCausalLM": _ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    "Qwen3MoeForCausalLM": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "Qwen3NextForCausalLM": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
    "Qwen3_5MoeForCausalLM": _ExpertNames("mlp", "gate_proj", "up_proj", "down_proj"),
}
_FUSED_EXPERTS = "mlp.experts."  # in transformers 5's own layout, of all architectures: all experts in one tensor
_INTERLEAVED_EXPERTS = ("GptOssForCausalLM",)  # so too, each gate followed by its up
PACKED_EXPERTS = "_blocks"  # behind the name of experts' weights in MXFP4, whose rows are not columns then
_NORM_NAMES: Mapping[str, Mapping[str, str]] = {
    "pre": {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {"post_attention_layernorm": "attention_out", "post_feedforward_layernorm": "mlp_out"},
    "sandwich": {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attention_out",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out",
    },
}


def targets(model: Decoder, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Target]]:
    """Every tensor that a checkpoint of this config must hold, and where it goes.

    `stored` are those it does hold, by name: they tell in which layout it has its experts.
    """
    config = model.config
    yield EMBEDDING, _whole(model.embed_weight)
    yield "model.norm.weight", _norm(model.norm, config)
    if not config.tie_word_embeddings:
        yield HEAD, _whole(model.lm_head.weight)
    for i, layer in enumerate(model.layers):
        yield from _layer_targets(f"model.layers.{i}.", layer, config, stored)


def expert_modules(config: DecoderConfig) -> list[str]:
    """The matrices of a sparse layer's experts, such as mlp.experts.0.gate_proj; none where they are one tensor."""
    names = _EXPERT_NAMES.get(config.architecture)
    if config.moe is None or names is None:
        return []
    experts = [f"{names.block}.experts.{expert}" for expert in range(config.moe.num_experts)]
    return [f"{expert}.{name}" for expert in experts for name in (names.gate, names.up, names.down)]


def _layer_targets(
    prefix: str, layer: DecoderLayer, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Target]]:
    for name, attribute in _NORM_NAMES[config.norms].items():
        yield f"{prefix}{name}.weight", _norm(getattr(layer, attribute), config)
    if isinstance(layer.attention, GatedDeltaNet):
        yield from _delta_net_targets(f"{prefix}linear_attn.", layer.attention, config)
    else:
        yield from _attention_targets(f"{prefix}self_attn.", layer.attention, config)
    if isinstance(layer.mlp, SparseMLP) and layer.mlp.shared is not None:
        yield from _mlp_targets(f"{prefix}mlp.shared_expert.", layer.mlp.shared.mlp, config)
        yield f"{prefix}mlp.shared_expert_gate.weight", _whole(layer.mlp.shared.gate.weight)
    if isinstance(layer.mlp, MLP):
        yield from _mlp_targets(f"{prefix}mlp.", layer.mlp, config)
    elif config.architecture in _INTERLEAVED_EXPERTS:
        is_packed = f"{prefix}{_FUSED_EXPERTS}gate_up_proj{PACKED_EXPERTS}" in stored
        yield from _interleaved_expert_targets(prefix, layer.mlp, is_packed=is_packed)
    elif f"{prefix}{_FUSED_EXPERTS}gate_up_proj" in stored:
        yield from _fused_expert_targets(prefix, layer.mlp, stored.get(f"{prefix}{_FUSED_EXPERTS}down_proj"))
    else:
        yield from _expert_targets(prefix, layer.mlp, config)


def _attention_targets(prefix: str, attention: Attention, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
    if config.architecture in _FUSED_IN_CHECKPOINT:
        parts = {"qkv_proj": q_size + 2 * kv_size}
    orders = {}
    if attention.has_gate:
        parts["q_proj"], orders["q_proj"] = 2 * q_size, gates_first(config)
    yield from _parts(prefix, attention.qkv_proj, parts, orders)
    yield from _parts(prefix, attention.o_proj, {"o_proj": config.hidden_size})
    if isinstance(attention.qk_norm, HeadQKNorm):
        q_HD, k_KD = attention.qk_norm.weight.data.split((config.num_heads, config.num_kv_heads))
        for name, view in (("q_norm", q_HD), ("k_norm", k_KD)):
            yield f"{prefix}{name}.weight", Target(view, (config.head_dim,), config.norm_offset)
    elif isinstance(attention.qk_norm, ProjectionQKNorm):
        yield f"{prefix}q_norm.weight", _norm(attention.qk_norm.q, config)
        yield f"{prefix}k_norm.weight", _norm(attention.qk_norm.k, config)
    if attention.sinks is not None:
        yield f"{prefix}sinks", _whole(attention.sinks)


def _delta_net_targets(prefix: str, net: GatedDeltaNet, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    sizes = config.delta_net
    assert sizes is not None, "there are none in other models"
    num_heads, (width, num_channels) = sizes.num_value_heads, net.conv.shape
    if config.architecture in BY_KEY_HEAD:
        orders = {"in_proj_qkvz": qkvz_order(sizes), "in_proj_ba": ba_order(sizes)}
        yield from _parts(prefix, net.qkvz_proj, {"in_proj_qkvz": sizes.conv_dim + sizes.value_dim}, orders)
        yield from _parts(prefix, net.ba_proj, {"in_proj_ba": 2 * num_heads}, orders)
    else:
        yield from _parts(prefix, net.qkvz_proj, {"in_proj_qkv": sizes.conv_dim, "in_proj_z": sizes.value_dim})
        yield from _parts(prefix, net.ba_proj, {"in_proj_b": num_heads, "in_proj_a": num_heads})
    yield f"{prefix}conv1d.weight", Target(net.conv.data[:, None].permute(2, 1, 0), (num_channels, 1, width))
    yield f"{prefix}A_log", _whole(net.a_log)
    yield f"{prefix}dt_bias", _whole(net.dt_bias)
    yield f"{prefix}norm.weight", _whole(net.norm.weight)
    yield from _parts(prefix, net.o_proj, {"out_proj": config.hidden_size})


def _mlp_targets(prefix: str, mlp: MLP, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    size = mlp.size
    parts = {"gate_proj": size, "up_proj": size}
    if config.architecture in _FUSED_IN_CHECKPOINT:
        parts = {"gate_up_proj": 2 * size}
    yield from _parts(prefix, mlp.gate_up_proj, parts)
    yield from _parts(prefix, mlp.down_proj, {"down_proj": config.hidden_size})


def _expert_targets(prefix: str, mlp: SparseMLP, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    names = _EXPERT_NAMES[config.architecture]
    yield f"{prefix}{names.block}.gate.weight", _whole(mlp.router.weight)
    sizes = {names.gate: mlp.moe.intermediate_size, names.up: mlp.moe.intermediate_size}
    for expert in range(mlp.moe.num_experts):
        of_expert = f"{prefix}{names.block}.experts.{expert}."
        gate_up, down = (_places(one).each(itemgetter(expert)) for one in (mlp.gate_up_proj, mlp.down_proj))
        yield from _weights(of_expert, gate_up, sizes)
        yield from _weights(of_expert, down, {names.down: config.hidden_size})


def _fused_expert_targets(prefix: str, mlp: SparseMLP, down: StoredTensor | None) -> Iterator[tuple[str, Target]]:
    """All experts in one tensor. Where `down`, as it is stored, lies by columns (Qwen3-VL), gate and up do so too."""
    yield f"{prefix}mlp.gate.weight", _whole(mlp.router.weight)
    _, num_outputs, num_inputs = _places(mlp.down_proj).target().shape
    by_columns = down is not None and num_inputs != num_outputs and down.shape[1:] == (num_inputs, num_outputs)
    for name, projection in (("gate_up_proj", mlp.gate_up_proj), ("down_proj", mlp.down_proj)):
        places = _places(projection)
        target = places.target()
        if by_columns:
            num_experts, rows, columns = target.shape
            target = places.each(lambda whole: whole.transpose(1, 2)).target((num_experts, columns, rows))
        yield f"{prefix}{_FUSED_EXPERTS}{name}", target


def _interleaved_expert_targets(prefix: str, mlp: SparseMLP, *, is_packed: bool) -> Iterator[tuple[str, Target]]:
    gate_up, down = mlp.gate_up_proj, mlp.down_proj
    num_experts, hidden_size, size = _places(down).target().shape
    assert mlp.router.bias is not None and gate_up.bias is not None and down.bias is not None, (
        "such experts have biases"
    )
    yield f"{prefix}mlp.router.weight", _whole(mlp.router.weight)
    yield f"{prefix}mlp.router.bias", _whole(mlp.router.bias)
    experts = f"{prefix}{_FUSED_EXPERTS}"

    def pairs(whole: torch.Tensor) -> torch.Tensor:  # [X, 2 I, ...] -> [X, I, 2, ...]
        return whole.unflatten(1, (2, size)).transpose(1, 2)

    if is_packed:
        rows = (num_experts, 2 * size, hidden_size)
        yield f"{experts}gate_up_proj{PACKED_EXPERTS}", _places(gate_up).each(pairs).target(rows)
        yield f"{experts}down_proj{PACKED_EXPERTS}", _places(down).target()
    else:
        columns = (num_experts, hidden_size, 2 * size), (num_experts, size, hidden_size)
        turned = _places(gate_up).each(lambda whole: pairs(whole).permute(0, 3, 1, 2))
        yield f"{experts}gate_up_proj", turned.target(columns[0])
        yield f"{experts}down_proj", _places(down).each(lambda whole: whole.transpose(1, 2)).target(columns[1])
    yield f"{experts}gate_up_proj_bias", Target(pairs(gate_up.bias.data), (num_experts, 2 * size))
    yield f"{experts}down_proj_bias", _whole(down.bias)


def _whole(parameter: nn.Parameter) -> Target:
    return Target(parameter.data, tuple(parameter.shape))


def _norm(norm: RMSNorm, config: DecoderConfig) -> Target:
    return Target(norm.weight.data, tuple(norm.weight.shape), config.norm_offset)


def _parts(
    prefix: str, fused: Linear | QuantizedLinear, sizes: Mapping[str, int], orders: _Orders = _AS_STORED
) -> Iterator[tuple[str, Target]]:
    """The parts of a fused projection: consecutive rows of its weight and bias."""
    yield from _weights(prefix, _places(fused), sizes, orders)
    if fused.bias is not None:
        for name, part in zip(sizes, fused.bias.data.split(list(sizes.values())), strict=True):
            yield f"{prefix}{name}.bias", Target(part, tuple(part.shape), order=orders.get(name))


def _weights(
    prefix: str, fused: _Places, sizes: Mapping[str, int], orders: _Orders = _AS_STORED
) -> Iterator[tuple[str, Target]]:
    first = 0
    for name, size in sizes.items():
        rows = slice(first, first + size)
        yield f"{prefix}{name}.weight", fused.each(itemgetter(rows)).target(order=orders.get(name))
        first += size


def _places(projection: Linear | ExpertLinear | QuantizedLinear) -> _Places:
    weight = projection.weight.data
    if not isinstance(projection, QuantizedLinear):
        return _Places(weight, None, None, 1)
    zero = projection.weight_zero if isinstance(projection, FourBitWeights) else None
    return _Places(weight, projection.weight_scale, zero, projection.numbers_per_item)
