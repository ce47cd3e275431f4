"""Tensor names of layers that keep a state, and where each goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from bulkrun.models.config.delta_net import DeltaNetConfig, KimiDeltaConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.gated_delta_net import GatedDeltaNet
from bulkrun.models.decoder.kimi_delta_net import KimiDeltaNet
from bulkrun.models.decoder.mamba import Mamba
from bulkrun.models.decoder.mamba2 import Mamba2
from bulkrun.models.decoder.norms import RMSNorm
from bulkrun.models.decoder.short_conv import ShortConv
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.row_orders import BY_KEY_HEAD, ba_order, qkvz_order
from bulkrun.models.loading.target import Target, norm_target, parts_of, whole

_PART_BY_PART = ("OlmoHybridForCausalLM",)  # each projection, and perhaps each convolution, is a tensor


def state_targets(
    layer: str,
    part: str | None,
    module: GatedDeltaNet | KimiDeltaNet | Mamba | Mamba2 | ShortConv,
    config: DecoderConfig,
    stored: Mapping[str, StoredTensor],
) -> Iterator[tuple[str, Target]]:
    """Those of a layer; their names begin with its prefix and the part's, or that which is common for its kind.

    `stored`: a checkpoint's tensors, which tell into which a convolution is cut.
    """
    if isinstance(module, GatedDeltaNet):
        yield from _delta_net_targets(layer + (part or "linear_attn."), module, config, stored)
    elif isinstance(module, KimiDeltaNet):
        yield from _kimi_targets(layer + (part or "self_attn."), module, config, stored)
    elif isinstance(module, Mamba):
        yield from _mamba_targets(layer + (part or "mamba."), module, config)
    elif isinstance(module, Mamba2):
        yield from _mamba2_targets(layer + (part or "mamba."), module, config)
    else:
        yield from _short_conv_targets(layer + (part or "conv."), module, config)


def _delta_net_targets(
    prefix: str, net: GatedDeltaNet, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Target]]:
    sizes = config.recurrence
    assert isinstance(sizes, DeltaNetConfig), "there are none in other models"
    is_parted, orders = config.architecture in _PART_BY_PART, {}
    qkvz = {"in_proj_qkv": sizes.conv_dim, "in_proj_z": sizes.value_dim}
    ba = dict.fromkeys(("in_proj_b", "in_proj_a"), sizes.num_value_heads)
    if config.architecture in BY_KEY_HEAD:
        qkvz, ba = {"in_proj_qkvz": sum(qkvz.values())}, {"in_proj_ba": sum(ba.values())}
        orders = {"in_proj_qkvz": qkvz_order(sizes), "in_proj_ba": ba_order(sizes)}
    elif is_parted:
        qkvz = {"q_proj": sizes.key_dim, "k_proj": sizes.key_dim, "v_proj": sizes.value_dim, "g_proj": sizes.value_dim}
        ba = dict.fromkeys(("b_proj", "a_proj"), sizes.num_value_heads)
    yield from parts_of(prefix, net.qkvz_proj, qkvz, orders)
    yield from parts_of(prefix, net.ba_proj, ba, orders)
    cut = _cut_convolution(prefix, sizes, stored) if is_parted else {f"{prefix}conv1d.weight": sizes.conv_dim}
    yield from _convolutions(net.conv.data, cut)
    yield f"{prefix}A_log", whole(net.a_log)
    yield f"{prefix}dt_bias", whole(net.dt_bias)
    yield f"{prefix}{'o_norm' if is_parted else 'norm'}.weight", whole(net.norm.weight)
    yield from parts_of(prefix, net.o_proj, {"o_proj" if is_parted else "out_proj": config.hidden_size})


def _kimi_targets(
    prefix: str, net: KimiDeltaNet, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Target]]:
    sizes = config.recurrence
    assert isinstance(sizes, KimiDeltaConfig), "there are none in other models"
    qkv = {"q_proj": sizes.key_dim, "k_proj": sizes.key_dim, "v_proj": sizes.value_dim}
    yield from parts_of(prefix, net.qkv_proj, qkv)
    yield from parts_of(prefix, net.low_proj, dict(zip(("f_a_proj", "g_a_proj", "b_proj"), net.low_sizes, strict=True)))
    yield from parts_of(prefix, net.decay_proj, {"f_b_proj": sizes.key_dim})
    yield from parts_of(prefix, net.z_proj, {"g_b_proj": sizes.value_dim})
    yield from _convolutions(net.conv.data, _cut_convolution(prefix, sizes, stored))
    yield f"{prefix}A_log", Target(net.a_log.data, (1, 1, sizes.num_value_heads, 1))
    yield f"{prefix}dt_bias", whole(net.dt_bias)
    yield f"{prefix}o_norm.weight", whole(net.norm.weight)
    yield from parts_of(prefix, net.o_proj, {"o_proj": config.hidden_size})


def _cut_convolution(prefix: str, sizes: DeltaNetConfig, stored: Mapping[str, StoredTensor]) -> dict[str, int]:
    """The tensors that a convolution is stored as, and each one's channels.

    transformers 5.24 writes three equal ones, whatever is of queries, keys and values.
    """
    if f"{prefix}conv1d.weight" in stored:
        return {f"{prefix}conv1d.weight": sizes.conv_dim}
    published = dict(zip("qkv", (sizes.key_dim, sizes.key_dim, sizes.value_dim), strict=True))
    cut = {f"{prefix}{part}_conv1d.weight": size for part, size in published.items()}
    found = {name: stored[name].shape[0] for name in cut if name in stored and stored[name].shape}
    return found if found.keys() == cut.keys() and sum(found.values()) == sizes.conv_dim else cut


def _mamba_targets(prefix: str, module: Mamba, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    yield from parts_of(prefix, module.in_proj, {"in_proj": 2 * module.d.numel()})
    yield f"{prefix}conv1d.weight", _convolution(module.conv.data)
    if module.conv_bias is not None:
        yield f"{prefix}conv1d.bias", whole(module.conv_bias)
    yield from parts_of(prefix, module.x_proj, {"x_proj": sum(module.low_sizes)})
    for name, norm in zip(("dt", "b", "c"), module.norms, strict=True):
        if isinstance(norm, RMSNorm):
            yield f"{prefix}{name}_layernorm.weight", norm_target(norm, config)
    yield from parts_of(prefix, module.dt_proj, {"dt_proj": module.d.numel()})
    yield f"{prefix}dt_proj.bias", whole(module.dt_bias)
    yield f"{prefix}A_log", Target(module.a_log.data.t(), tuple(module.a_log.shape[::-1]))
    yield f"{prefix}D", whole(module.d)
    yield from parts_of(prefix, module.o_proj, {"out_proj": config.hidden_size})


def _mamba2_targets(prefix: str, module: Mamba2, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    yield from parts_of(prefix, module.in_proj, {"in_proj": sum(module.parts)})
    yield f"{prefix}conv1d.weight", _convolution(module.conv.data)
    if module.conv_bias is not None:
        yield f"{prefix}conv1d.bias", whole(module.conv_bias)
    for name, parameter in (("A_log", module.a_log), ("dt_bias", module.dt_bias), ("D", module.d)):
        yield f"{prefix}{name}", whole(parameter)
    if module.norm is not None:
        yield f"{prefix}norm.weight", Target(module.norm.weight.data, (module.norm.weight.numel(),))
    yield from parts_of(prefix, module.o_proj, {"out_proj": config.hidden_size})


def _short_conv_targets(prefix: str, module: ShortConv, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    yield from parts_of(prefix, module.in_proj, {"in_proj": 3 * config.hidden_size})
    yield f"{prefix}conv.weight", _convolution(module.conv.data)
    if module.conv_bias is not None:
        yield f"{prefix}conv.bias", whole(module.conv_bias)
    yield from parts_of(prefix, module.o_proj, {"out_proj": config.hidden_size})


def _convolutions(weight_WC: torch.Tensor, cut: Mapping[str, int]) -> Iterator[tuple[str, Target]]:
    """Consecutive channels of one, as many as each tensor has."""
    for name, part_WC in zip(cut, weight_WC.split([*cut.values()], dim=1), strict=True):
        yield name, _convolution(part_WC)


def _convolution(weight_WC: torch.Tensor) -> Target:
    """Stored channel by channel [C, 1, W], as torch has it."""
    width, num_channels = weight_WC.shape
    return Target(weight_WC[:, None].permute(2, 1, 0), (num_channels, 1, width))
