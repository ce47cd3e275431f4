"""A delta net that forgets channel by channel (Kimi Linear, arXiv 2510.26692)."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.delta_net import KimiDeltaConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import GatedRMSNorm
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class KimiDeltaNet(nn.Module):
    """A convolution over the last tokens, the gated delta rule over the sequence's state, and a gated norm.

    How much each channel forgets, and the norm's gates z, are made of few numbers of a token: with b, which says how
    much it corrects, these are one projection. They and what makes the others of them stay in the model's dtype where
    queries, keys and values are quantized.
    """

    in_float32 = ("a_log", "dt_bias")

    def __init__(self, config: DecoderConfig, index: int) -> None:
        """`index`: of its state among the cache's."""
        super().__init__()
        net = config.recurrence
        assert isinstance(net, KimiDeltaConfig), "only models that say so have such nets"
        self.index, self.head_dim = index, net.value_head_dim
        self.low_sizes = (net.key_head_dim, net.value_head_dim, net.num_value_heads)  # f, g, b
        self.qkv_proj = Linear(config.hidden_size, net.conv_dim)
        self.low_proj = Linear(config.hidden_size, sum(self.low_sizes))
        self.decay_proj = Linear(net.key_head_dim, net.key_dim)
        self.z_proj = Linear(net.value_head_dim, net.value_dim)
        self.conv = empty_parameter(net.conv_width, net.conv_dim)
        self.a_log = empty_parameter(net.num_value_heads)
        self.dt_bias = empty_parameter(net.key_dim)
        self.norm = GatedRMSNorm(config.rms_norm_eps, net.value_head_dim, silu=False)
        self.o_proj = Linear(net.value_dim, config.hidden_size)

    def forward(self, x_TE: torch.Tensor, _rotary: object, kv_cache: KVCache, meta: AttentionMetadata) -> torch.Tensor:
        """[T, E] -> [T, E]; brings the sequences' states up to this step's last tokens."""
        state = kv_cache.states[self.index]
        assert state.matrix_RHDV is not None, "the rule is about one"
        qkv_TC = ops.causal_conv(self.qkv_proj(x_TE), self.conv, None, state.conv_RWC, meta, silu=True)
        f_TD, g_TD, b_TH = self.low_proj(x_TE).split(self.low_sizes, dim=1)
        ba_TG = torch.cat((b_TH, self.decay_proj(f_TD)), dim=1)
        out_THV = ops.gated_delta_rule(qkv_TC, ba_TG, self.a_log, self.dt_bias, state.matrix_RHDV, meta)
        z_THV = self.z_proj(g_TD).unflatten(1, (-1, self.head_dim))
        return self.o_proj(self.norm(out_THV, z_THV).flatten(1))
