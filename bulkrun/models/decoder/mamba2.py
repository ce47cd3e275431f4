"""A state space in the place of attention: Mamba 2 (Granite 4.0-H, Nemotron-H)."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.mamba2 import Mamba2Config
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import GatedRMSNorm, Linear, empty_parameter
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class Mamba2(nn.Module):
    """A convolution over the last tokens, a recurrence over the sequence's state, and a norm behind a gate.

    Gates z, the heads' inputs with what writes and reads states, and each head's step are one projection.
    """

    in_float32 = ("a_log", "dt_bias", "d")

    def __init__(self, config: DecoderConfig, index: int) -> None:
        """`index`: of its state among the cache's."""
        super().__init__()
        kind = config.recurrence
        assert isinstance(kind, Mamba2Config), "only models that say so have Mamba 2"
        self.index, self.num_groups = index, kind.num_groups
        self.parts = [kind.inner_size, kind.conv_dim, kind.num_heads]
        self.in_proj = Linear(config.hidden_size, sum(self.parts), bias=kind.has_biases)
        self.conv = empty_parameter(kind.conv_width, kind.conv_dim)
        self.conv_bias = empty_parameter(kind.conv_dim) if kind.has_conv_bias else None
        self.a_log, self.dt_bias, self.d = (empty_parameter(kind.num_heads) for _ in range(3))
        self.norm = GatedRMSNorm(
            config.rms_norm_eps, kind.num_groups, kind.inner_size // kind.num_groups, norm_before_gate=False
        )
        self.o_proj = Linear(kind.inner_size, config.hidden_size, bias=kind.has_biases)

    def forward(self, x_TE: torch.Tensor, _rotary: object, kv_cache: KVCache, meta: AttentionMetadata) -> torch.Tensor:
        """[T, E] -> [T, E]; brings the sequences' states up to this step's last tokens."""
        state = kv_cache.states[self.index]
        assert state.matrix_RHDV is not None, "the recurrence is about one"
        z_TA, xbc_TC, dt_TH = self.in_proj(x_TE).split(self.parts, dim=1)
        xbc_TC = ops.causal_conv(xbc_TC, self.conv, self.conv_bias, state.conv_RWC, meta, silu=True)
        out_THP = ops.state_space(xbc_TC, dt_TH, self.a_log, self.dt_bias, self.d, state.matrix_RHDV, meta)
        out_TGA, z_TGA = (one.flatten(1).unflatten(1, (self.num_groups, -1)) for one in (out_THP, z_TA))
        return self.o_proj(self.norm(out_TGA, z_TGA).flatten(1))
