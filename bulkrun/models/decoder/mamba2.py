"""A state space in the place of attention or beside it: Mamba 2 (Granite 4.0-H, Nemotron-H, Falcon-H1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun import ops
from bulkrun.models.config.mamba2 import Mamba2Config
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import GatedRMSNorm
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class Mamba2(nn.Module):
    """A convolution over the last tokens, a recurrence over the sequence's state, and a gate, mostly with a norm.

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
        self.norm: GatedRMSNorm | None = None
        if kind.has_norm:
            sizes = kind.num_groups, kind.inner_size // kind.num_groups
            self.norm = GatedRMSNorm(config.rms_norm_eps, *sizes, norm_before_gate=kind.norm_before_gate)
        self._kind = kind
        self._multiplier_A: torch.Tensor | None = None
        self.o_proj = Linear(kind.inner_size, config.hidden_size, bias=kind.has_biases)

    def forward(self, x_TE: torch.Tensor, _rotary: object, kv_cache: KVCache, meta: AttentionMetadata) -> torch.Tensor:
        """[T, E] -> [T, E]; brings the sequences' states up to this step's last tokens."""
        state = kv_cache.states[self.index]
        assert state.matrix_RHDV is not None, "the recurrence is about one"
        z_TA, xbc_TC, dt_TH = self._projected(x_TE).split(self.parts, dim=1)
        xbc_TC = ops.causal_conv(xbc_TC, self.conv, self.conv_bias, state.conv_RWC, meta, silu=True)
        out_THP = ops.state_space(xbc_TC, dt_TH, self.a_log, self.dt_bias, self.d, state.matrix_RHDV, meta)
        return self.o_proj(self._gated(out_THP.flatten(1), z_TA))

    def _projected(self, x_TE: torch.Tensor) -> torch.Tensor:
        """Gates, inputs, what writes and reads, steps, multiplied by what the model has for each: [T, A]."""
        parts_TA = self.in_proj(x_TE)
        factors, sizes = self._kind.part_multipliers, self._kind.part_sizes
        if factors is None:
            return parts_TA
        if self._multiplier_A is None:
            pieces = [self.conv.new_full((size,), factor) for factor, size in zip(factors, sizes, strict=True)]
            self._multiplier_A = torch.cat(pieces)
        return parts_TA.mul_(self._multiplier_A)

    def _gated(self, out_TA: torch.Tensor, z_TA: torch.Tensor) -> torch.Tensor:
        if self.norm is None:
            return out_TA * F.silu(z_TA)
        out_TGA, z_TGA = (one.unflatten(1, (self.num_groups, -1)) for one in (out_TA, z_TA))
        return self.norm(out_TGA, z_TGA).flatten(1)
