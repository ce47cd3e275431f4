"""What brings the tokens of a compiled layer together, as weights of that call: attention and what keeps a state."""

from __future__ import annotations

import torch

from bulkrun.models.config.delta_net import DeltaNetConfig
from bulkrun.models.config.mamba import MambaConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.attention import Attention
from bulkrun.models.decoder.gated_delta_net import GatedDeltaNet
from bulkrun.models.decoder.layers import Linear
from bulkrun.models.decoder.mamba import Mamba
from bulkrun.models.decoder.mamba2 import Mamba2
from bulkrun.models.decoder.norms import HeadQKNorm, ProjectionQKNorm, RMSNorm
from bulkrun.models.decoder.quantized_layers import FourBitLinear, Int8Linear
from bulkrun.models.decoder.short_conv import ShortConv
from bulkrun.ops.cpu.attention_mixer import AttentionWeights
from bulkrun.ops.cpu.stack_memory import Matrix
from bulkrun.ops.cpu.state_mixers import DeltaNetWeights, Mamba2Weights, MambaWeights, ShortConvWeights, StateWeights


def mixer_weights(
    module: Attention | GatedDeltaNet | Mamba | Mamba2 | ShortConv, config: DecoderConfig, rotary: int | None
) -> AttentionWeights | StateWeights:
    """Those of a layer's mixer. rotary: which of the step's rotary embeddings it has."""
    if isinstance(module, Attention):
        return _attention(module, config, rotary)
    if isinstance(module, GatedDeltaNet):
        return _delta_net(module, config)
    if isinstance(module, Mamba):
        return _mamba(module, config)
    if isinstance(module, ShortConv):
        return ShortConvWeights(matrix_of(module.in_proj), module.conv, module.conv_bias)
    assert module.norm is not None, "Mamba 2 without a norm is beside attention"
    return Mamba2Weights(
        matrix_of(module.in_proj), module.conv, module.conv_bias, module.norm.weight, module.a_log, module.dt_bias,
        module.d,
    )  # fmt: skip


def _attention(attention: Attention, config: DecoderConfig, rotary: int | None) -> AttentionWeights:
    qk_norm = attention.qk_norm
    return AttentionWeights(
        qkv=matrix_of(attention.qkv_proj),
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        qk_norm=qk_norm.weight_ND if isinstance(qk_norm, HeadQKNorm) else None,
        projection_norms=(qk_norm.q.weight, qk_norm.k.weight) if isinstance(qk_norm, ProjectionQKNorm) else None,
        sliding_window=attention.sliding_window,
        rotary=rotary,
        has_own_keys=attention.has_own_keys,
        keys_are_values=attention.keys_are_values,
        norms_values=config.norms_values and attention.has_own_keys,
    )


def _delta_net(net: GatedDeltaNet, config: DecoderConfig) -> DeltaNetWeights:
    sizes = config.recurrence
    assert isinstance(sizes, DeltaNetConfig), "only models that say so have delta nets"
    return DeltaNetWeights(
        qkvz=matrix_of(net.qkvz_proj),
        ba=matrix_of(net.ba_proj),
        conv=net.conv,
        norm=net.norm.weight,
        a_log=net.a_log,
        dt_bias=net.dt_bias,
        num_key_heads=sizes.num_key_heads,
        key_size=sizes.key_head_dim,
        beta_scale=net.beta_scale,
        norm_eps=net.norm.eps,
    )


def _mamba(module: Mamba, config: DecoderConfig) -> MambaWeights:
    sizes = config.recurrence
    assert isinstance(sizes, MambaConfig), "only models that say so have Mamba"
    return MambaWeights(
        in_proj=matrix_of(module.in_proj),
        x_proj=matrix_of(module.x_proj),
        dt_proj=matrix_of(module.dt_proj),
        conv=module.conv,
        conv_bias=module.conv_bias,
        norms=_norms_of_mamba(module, config, sizes),
        norm_eps=sizes.norm_eps if sizes.norms == "plain" else config.rms_norm_eps,
        rate=module.rates(),
        dt_bias=module.dt_bias,
        d=module.d,
        step_rank=sizes.step_rank,
        head_dim=sizes.matrix_shape[2],
    )


def _norms_of_mamba(module: Mamba, config: DecoderConfig, sizes: MambaConfig) -> tuple[torch.Tensor, ...] | None:
    """Plain ones have weights of the model's other norms' dtype."""
    if sizes.norms == "learned":
        return tuple(norm.weight for norm in module.norms if isinstance(norm, RMSNorm))
    dtype = torch.float32 if config.norm_rounds_once else module.conv.dtype
    return tuple(torch.ones(size, dtype=dtype) for size in sizes.low_sizes) if sizes.norms == "plain" else None


def matrix_of(linear: Linear | Int8Linear | FourBitLinear) -> Matrix:
    """A projection's weight as it lies, and its bias."""
    if isinstance(linear, FourBitLinear):
        return Matrix(linear.four_bit_weight, linear.bias)
    if isinstance(linear, Int8Linear):
        return Matrix(linear.int8_weight, linear.bias)
    weight = linear.weight.data
    return Matrix(weight.to_dense() if weight.is_mkldnn else weight, linear.bias)
