"""Several residual streams of each token (Gemma 3n), of which one goes through the blocks of the layers.

The loop over blocks carries them in the place of the one stream that other families have, and where those have a norm
of it between two blocks, there is a function of them here (`BetweenBlocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from bulkrun import ops
from bulkrun.models.config.altup import AltUpConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import RMSNorm

_MIN_MEAN_SQUARE = 1e-5  # of what is scaled to the length of the first stream


@dataclass(slots=True)
class Streams:
    """N streams of T tokens; what stands between two blocks changes them in place."""

    all_NTE: torch.Tensor  # within a layer: as they were predicted before its blocks
    active_TE: torch.Tensor  # the first one, with what the layer's blocks have added so far

    def __getitem__(self, tokens: torch.Tensor) -> Streams:
        """Those of some tokens alone, int64 [S]."""
        return Streams(self.all_NTE[:, tokens], self.active_TE[tokens])

    def tell_others(self, found_TE: torch.Tensor) -> None:
        """Add to all but the first one."""
        self.all_NTE[1:].add_(found_TE)


class BetweenBlocks:
    """Stands where other families have a norm of the residual stream: is told what the block before has found, changes
    the streams, and says what the next block is to see."""

    def __init__(
        self,
        function: Callable[[torch.Tensor, Streams], torch.Tensor],
        first: Callable[[Streams], torch.Tensor] | None = None,
    ) -> None:
        """`first`: in its place before the first block of all, where nothing has been found yet."""
        self.function, self.first = function, first

    def __call__(self, streams: Streams) -> torch.Tensor:
        """What the first block of all sees [T, E]."""
        assert self.first is not None, "layers begin with attention"
        return self.first(streams)

    def add(self, x: torch.Tensor, streams: Streams, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, Streams]:
        """(what the next block sees, the streams)."""
        assert scale is None, "no family with several streams scales its layers"
        return self.function(x, streams), streams


class ResidualStreams(nn.Module):
    """Makes the streams of embeddings, and one of the streams again: projections, scaled to the first one's length."""

    def __init__(self, config: DecoderConfig, altup: AltUpConfig) -> None:
        super().__init__()
        size, self.num_others = config.hidden_size, altup.num_streams - 1
        self.projection = Linear(size, self.num_others * size)
        unembed = nn.ModuleList(Linear(size, size) for _ in range(self.num_others))
        self.unembed = cast("Sequence[Linear]", unembed)  # which does not say of what

    def forward(self, embeds_TE: torch.Tensor) -> Streams:
        """[T, E] -> the streams before the first layer."""
        others_TNE = self.projection(embeds_TE).unflatten(-1, (self.num_others, -1))
        return _with_others(embeds_TE, others_TNE.transpose(0, 1))

    def merged(self, streams: Streams) -> torch.Tensor:
        """The mean of all behind the last layer [T, E]."""
        first_TE, *others = streams.all_NTE
        projected = [project(other_TE) for project, other_TE in zip(self.unembed, others, strict=True)]
        return _with_others(first_TE, torch.stack(projected)).all_NTE.mean(0)


def _with_others(first_TE: torch.Tensor, others_NTE: torch.Tensor) -> Streams:
    others_NTE = ops.with_rms_of(others_NTE, first_TE, _MIN_MEAN_SQUARE)
    return Streams(torch.cat((first_TE.unsqueeze(0), others_NTE)), first_TE)


class AltUp(nn.Module):
    """Predicts a layer's streams before its blocks and corrects them behind (Baykal et al., arXiv 2301.13310)."""

    def __init__(self, config: DecoderConfig, altup: AltUpConfig) -> None:
        super().__init__()
        size, num_streams = config.hidden_size, altup.num_streams
        self.router_norm = RMSNorm(config, size)
        self.router = Linear(size, num_streams)
        self.prediction = empty_parameter(num_streams**2, num_streams)
        self.correction = empty_parameter(num_streams, num_streams)
        self.output_scale = empty_parameter(size)

    def predict(self, streams_NTE: torch.Tensor) -> torch.Tensor:
        """[N, T, E] -> what they are likely to become in the layer."""
        return ops.predict_streams(streams_NTE, self._modes(streams_NTE[0]), self.prediction)

    def correct(self, predicted_NTE: torch.Tensor, computed_TE: torch.Tensor) -> torch.Tensor:
        """What the layer's blocks computed of the first stream, passed on to all."""
        return ops.correct_streams(predicted_NTE, computed_TE, self._modes(computed_TE), self.correction)

    def _modes(self, x_TE: torch.Tensor) -> torch.Tensor:
        """How much of each kind of update a token asks for [T, N]."""
        routed_TN = self.router(self.router_norm(x_TE))
        return routed_TN.float().mul_(1.0 / x_TE.shape[-1]).tanh_().to(x_TE.dtype)
