"""Which decoders can run their steps as one compiled call on a CPU, and the tables of that call."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import torch

from bulkrun.models.config.delta_net import DeltaNetConfig
from bulkrun.models.config.mamba import MambaConfig
from bulkrun.models.config.mamba2 import Mamba2Config
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.decoder.compiled_mixers import matrix_of, mixer_weights
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.decoder_layer import AttentionBesideMamba2, DecoderLayer
from bulkrun.models.decoder.kimi_delta_net import KimiDeltaNet
from bulkrun.models.decoder.latent_attention import LatentAttention
from bulkrun.models.decoder.layers import MLP, Linear, PlainMLP
from bulkrun.models.decoder.norms import LayerNorm, NormOfBefore, RMSNorm
from bulkrun.models.decoder.quantized_layers import FourBitLinear, Int8Linear
from bulkrun.ops.cpu.layer_stack import LayerStack, can_stack
from bulkrun.ops.cpu.layer_weights import Heads, InputWeights, LayerWeights, StackSizes
from bulkrun.ops.cpu.panel_linear import PANEL
from bulkrun.ops.cpu.stack_memory import PAD
from bulkrun.ops.cpu.state_mixers import can_mix_delta_net, can_mix_mamba, can_mix_short_conv
from bulkrun.ops.xielu import factors

_MAX_COPIED_BYTES = 256 * 2**20  # of weights that are held twice: reading more takes so long that calls do not count


def compile_layers(model: Decoder) -> LayerStack | None:
    """The layers of a decoder whose weights are loaded, as one call; None where that cannot be or does not pay."""
    config = model.config
    if model.device.type != "cpu" or _has_others(config) or not _are_suitable_linears(model):
        return None
    sizes = _sizes(config, model.dtype)
    heads = [Heads(kv.num_heads, kv.head_dim) for kv in config.layers_kv]
    if not can_stack(sizes, model.norm.weight.dtype, heads) or not _can_mix(config):
        return None
    ropes = list(model.inv_freqs)
    layers = [_weights(layer, with_mlp, config, ropes) for layer, with_mlp in _pairs(model.layers)]
    return LayerStack(layers, model.norm.weight, sizes, _bias(model.norm))


def _pairs(layers: Iterable[DecoderLayer]) -> list[tuple[DecoderLayer, DecoderLayer]]:
    """Each layer that mixes tokens, and the one whose MLP comes then: the same, or behind it one that is no more."""
    pairs: list[tuple[DecoderLayer, DecoderLayer]] = []
    for layer in layers:
        if layer.attention is None:
            pairs[-1] = pairs[-1][0], layer
        else:
            pairs.append((layer, layer))
    return pairs


def _has_others(config: DecoderConfig) -> bool:
    """Whether layers have what the call knows nothing of."""
    return (
        config.moe is not None
        or config.has_sinks
        or config.qkv_limit is not None
        or config.gates_heads
        or not _are_mlps_behind_mixers(config)
        or not (config.has_mlp_gates or _are_plain_mlps_whole(config))
        or config.qk_norm in ("turned_head", "centered_head", "plain_head")
        or config.attends_beside_states
        or config.latent is not None
        or config.altup is not None
        or not _are_whole(config)
    )


def _are_mlps_behind_mixers(config: DecoderConfig) -> bool:
    """Whether each layer that is an MLP alone (Nemotron-H) is behind one that has none."""
    alone = config.mlp_alone or ()
    return not any(map(all, pairwise((True, *alone))))


def _are_plain_mlps_whole(config: DecoderConfig) -> bool:
    return not any(config.mlp_size(layer) % PAD for layer in range(config.num_layers))


def _are_whole(config: DecoderConfig) -> bool:
    """Whether rows of all widths are whole words where there are several: none finds another's numbers behind its own.

    Layers without keys of their own come after all others.
    """
    if config.unlike_layers is None and config.layer_inputs is None:
        return True
    widths = [config.num_heads * kv.head_dim for kv in config.layers_kv]
    inner = [config.mlp_size(layer) for layer in range(config.num_layers)]
    input_size = 0 if config.layer_inputs is None else config.layer_inputs.size
    own = [kv.source == layer for layer, kv in enumerate(config.layers_kv)]
    return not any(width % PAD for width in (*widths, *inner, input_size)) and own == sorted(own, reverse=True)


def _can_mix(config: DecoderConfig) -> bool:
    kind = config.recurrence
    if isinstance(kind, DeltaNetConfig):
        return can_mix_delta_net(kind.num_value_heads, kind.key_head_dim, kind.value_head_dim)
    if isinstance(kind, Mamba2Config):
        return can_mix_mamba(kind.num_heads, kind.state_size, kind.head_dim)
    if isinstance(kind, MambaConfig):
        return can_mix_mamba(*kind.matrix_shape)
    return kind is None or can_mix_short_conv(config.hidden_size)


def _are_suitable_linears(model: Decoder) -> bool:
    """All in panels, or plain and together so small that a copy costs little; some are so narrow that none counts."""
    products = [module for layer in model.layers for name, module in layer.named_modules() if _is_wide(name)]
    weights = [module.weight for module in products if isinstance(module, Linear | Int8Linear | FourBitLinear)]
    if len(weights) < len(products):
        return False
    are_whole = not any(model.config.mlp_size(layer) % PANEL for layer in range(len(model.layers)))
    if not are_whole and any(map(_has_packed_gates, model.layers)):
        return False  # gates and ups meet within a panel
    if all(weight.ndim == 4 for weight in weights):
        return True
    if any(isinstance(module, Int8Linear | FourBitLinear) for module in products):
        return False
    return sum(weight.numel() * weight.element_size() for weight in weights) <= _MAX_COPIED_BYTES


def _is_wide(name: str) -> bool:
    """Whether a module of this name is one of the products that take a layer's time."""
    return name.endswith("_proj") and not name.endswith(("ba_proj", "x_proj", "dt_proj"))


def _has_packed_gates(layer: DecoderLayer) -> bool:
    return isinstance(layer.mlp, MLP) and layer.mlp.gate_up_proj.weight.ndim == 4


def _sizes(config: DecoderConfig, dtype: torch.dtype) -> StackSizes:
    return StackSizes(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        eps=config.rms_norm_eps,
        scale=config.attention_scale,
        soft_cap=config.attention_soft_cap,
        residual_multiplier=config.residual_multiplier,
        activation=config.activation,
        is_layer_norm=config.are_centered,
        is_beside=config.norms in ("beside", "beside_own"),
        has_mlp_gates=config.has_mlp_gates,
        is_causal=config.is_causal,
        dtype=dtype,
        gates_attention=config.gates_attention,
        input_size=0 if config.layer_inputs is None else config.layer_inputs.size,
    )


def _weights(
    layer: DecoderLayer, with_mlp: DecoderLayer, config: DecoderConfig, ropes: list[RopeConfig]
) -> LayerWeights:
    attention, mlp, rope = layer.attention, with_mlp.mlp, layer.rope
    assert attention is not None and isinstance(mlp, MLP | PlainMLP | None), "neither mixtures nor MLPs alone"
    assert not isinstance(attention, AttentionBesideMamba2 | KimiDeltaNet | LatentAttention), "not stacked"
    weights = LayerWeights(
        input_norm=_norm(layer.input_norm),
        mixer=mixer_weights(attention, config, None if rope is None else ropes.index(rope)),
        o=matrix_of(attention.o_proj),
        mixer_out_norm=_norm(layer.attention_out),
        inputs=_inputs(layer),
        scale=1.0 if layer.scale is None else layer.scale.item(),
        input_bias=_bias(layer.input_norm),
    )
    return weights if mlp is None else _with_mlp(weights, with_mlp, mlp)


def _with_mlp(weights: LayerWeights, layer: DecoderLayer, mlp: MLP | PlainMLP) -> LayerWeights:
    return replace(
        weights,
        mlp_norm=_norm(layer.mlp_norm),
        gate_up=matrix_of(mlp.gate_up_proj if isinstance(mlp, MLP) else mlp.up_proj),
        down=matrix_of(mlp.down_proj),
        intermediate_size=mlp.size,
        mlp_out_norm=_norm(layer.mlp_out),
        xielu=_xielu(mlp),
        mlp_bias=_bias(layer.mlp_norm),
    )


def _xielu(mlp: MLP | PlainMLP) -> tuple[float, float]:
    if isinstance(mlp, MLP) or mlp.alphas is None:
        return 0.0, 0.0
    above, below = factors(mlp.alphas).tolist()
    return above, below


def _inputs(layer: DecoderLayer) -> InputWeights | None:
    mlp, norm = layer.input_mlp, layer.input_out
    return (
        None
        if mlp is None or norm is None
        else InputWeights(matrix_of(mlp.gate_proj), matrix_of(mlp.out_proj), norm.weight)
    )


def _norm(module: object) -> torch.Tensor | None:
    module = module.norm if isinstance(module, NormOfBefore) else module
    return module.weight if isinstance(module, LayerNorm | RMSNorm) else None


def _bias(module: object) -> torch.Tensor | None:
    module = module.norm if isinstance(module, NormOfBefore) else module
    return module.bias if isinstance(module, LayerNorm) else None
