"""A selective state space in the place of attention: Mamba, the first kind (Mamba, Falcon Mamba, Jamba)."""

from __future__ import annotations

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.mamba import MambaConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import NoNorm, PlainNorm, RMSNorm
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class Mamba(nn.Module):
    """A convolution over the last tokens, a recurrence over each channel's state, and a gate.

    What steps are made of, and what writes and reads states, is one projection of what was convolved. It and that of
    the steps stay in the model's dtype where the others are quantized.
    """

    in_float32 = ("a_log", "dt_bias", "d")

    def __init__(self, config: DecoderConfig, index: int) -> None:
        """`index`: of its state among the cache's."""
        super().__init__()
        kind = config.recurrence
        assert isinstance(kind, MambaConfig), "only models that say so have Mamba"
        self.index, self.low_sizes = index, kind.low_sizes
        self.in_proj = Linear(config.hidden_size, 2 * kind.inner_size, bias=kind.has_biases)
        self.conv = empty_parameter(kind.conv_width, kind.inner_size)
        self.conv_bias = empty_parameter(kind.inner_size) if kind.has_conv_bias else None
        self.x_proj = Linear(kind.inner_size, sum(kind.low_sizes))
        self.norms = nn.ModuleList(_norm(config, kind, size) for size in kind.low_sizes)
        self.dt_proj = Linear(kind.step_rank, kind.inner_size)
        self.a_log = empty_parameter(kind.state_size, kind.inner_size)
        self.dt_bias, self.d = (empty_parameter(kind.inner_size) for _ in range(2))
        self._rate_NC: torch.Tensor | None = None
        self.o_proj = Linear(kind.inner_size, config.hidden_size, bias=kind.has_biases)

    def forward(self, x_TE: torch.Tensor, _rotary: object, kv_cache: KVCache, meta: AttentionMetadata) -> torch.Tensor:
        """[T, E] -> [T, E]; brings the sequences' states up to this step's last tokens."""
        state = kv_cache.states[self.index]
        assert state.matrix_RHDV is not None, "the recurrence is about one"
        x_TC, gate_TC = self.in_proj(x_TE).chunk(2, dim=1)
        x_TC = ops.causal_conv(x_TC, self.conv, self.conv_bias, state.conv_RWC, meta, silu=True)
        low = self.x_proj(x_TC).split(self.low_sizes, dim=1)
        dt_TR, b_TN, c_TN = (norm(part) for norm, part in zip(self.norms, low, strict=True))
        out_TC = ops.selective_scan(
            x_TC, self.dt_proj(dt_TR), b_TN, c_TN, gate_TC,
            self.rates(), self.dt_bias, self.d, state.matrix_RHDV, meta,
        )  # fmt: skip
        return self.o_proj(out_TC)

    def rates(self) -> torch.Tensor:
        """By how much each number of a channel is forgotten, made once: the first step of any kind runs uncaptured."""
        if self._rate_NC is None:
            self._rate_NC = -self.a_log.data.exp()
        return self._rate_NC


def _norm(config: DecoderConfig, kind: MambaConfig, size: int) -> RMSNorm | PlainNorm | NoNorm:
    if kind.norms == "learned":
        return RMSNorm(config, size)
    return PlainNorm(kind.norm_eps) if kind.norms == "plain" else NoNorm()
