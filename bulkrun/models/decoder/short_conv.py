"""A gated convolution over the last tokens in the place of attention (LFM2)."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.short_conv import ShortConvConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class ShortConv(nn.Module):
    """Each channel's input is gated, summed with those of the last tokens, and gated again."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        """`index`: of its state among the cache's."""
        super().__init__()
        kind, size = config.recurrence, config.hidden_size
        assert isinstance(kind, ShortConvConfig), "only models that say so have short convolutions"
        self.index = index
        self.in_proj = Linear(size, 3 * size, bias=kind.has_biases)  # gates before, gates after, inputs
        self.conv = empty_parameter(kind.conv_width, size)
        self.conv_bias = empty_parameter(size) if kind.has_biases else None
        self.o_proj = Linear(size, size, bias=kind.has_biases)

    def forward(self, x_TE: torch.Tensor, _rotary: object, kv_cache: KVCache, meta: AttentionMetadata) -> torch.Tensor:
        """[T, E] -> [T, E]; brings the sequences' states up to this step's last tokens."""
        before_TE, after_TE, x_TE = self.in_proj(x_TE).chunk(3, dim=1)
        state = kv_cache.states[self.index]
        x_TE = ops.causal_conv(before_TE * x_TE, self.conv, self.conv_bias, state.conv_RWC, meta, silu=False)
        return self.o_proj(after_TE * x_TE)
