"""Linear attention in the place of attention: a gated delta net (Qwen3-Next, Qwen3.5, OLMo Hybrid)."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.delta_net import DeltaNetConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import GatedRMSNorm
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class GatedDeltaNet(nn.Module):
    """A convolution over the last tokens, the gated delta rule over the sequence's state, and a gated norm.

    Queries, keys, values and the norm's gates z are one projection; b and a, which say how much a token corrects and
    forgets, are another, which stays in the model's dtype where the first is quantized.
    """

    in_float32 = ("a_log", "dt_bias")

    def __init__(self, config: DecoderConfig, index: int) -> None:
        """`index`: of its state among the cache's."""
        super().__init__()
        net = config.recurrence
        assert isinstance(net, DeltaNetConfig), "only models that say so have delta nets"
        self.index, self.conv_dim, self.value_head_dim = index, net.conv_dim, net.value_head_dim
        self.qkvz_proj = Linear(config.hidden_size, net.conv_dim + net.value_dim)
        self.ba_proj = Linear(config.hidden_size, 2 * net.num_value_heads)
        self.conv = empty_parameter(net.conv_width, net.conv_dim)
        self.a_log = empty_parameter(net.num_value_heads)
        self.dt_bias = empty_parameter(net.num_value_heads)
        self.norm = GatedRMSNorm(net.norm_eps or config.rms_norm_eps, net.value_head_dim)
        self.beta_scale = net.beta_scale
        self.o_proj = Linear(net.value_dim, config.hidden_size)

    def forward(self, x_TE: torch.Tensor, _rotary: object, kv_cache: KVCache, meta: AttentionMetadata) -> torch.Tensor:
        """[T, E] -> [T, E]; brings the sequences' states up to this step's last tokens."""
        state = kv_cache.states[self.index]
        qkv_TC, z_TA = self.qkvz_proj(x_TE).tensor_split((self.conv_dim,), dim=1)
        assert state.matrix_RHDV is not None, "the rule is about one"
        qkv_TC = ops.causal_conv(qkv_TC, self.conv, None, state.conv_RWC, meta, silu=True)
        out_THV = ops.gated_delta_rule(
            qkv_TC, self.ba_proj(x_TE), self.a_log, self.dt_bias, state.matrix_RHDV, meta, beta_scale=self.beta_scale
        )
        z_THV = z_TA.unflatten(1, (-1, self.value_head_dim))
        return self.o_proj(self.norm(out_THV, z_THV).flatten(1))
