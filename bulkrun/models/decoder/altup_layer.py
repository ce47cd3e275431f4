"""A layer of Gemma 3n: attention, a low-rank branch beside it and an MLP, around one of several residual streams."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from bulkrun.models.config.altup import AltUpConfig
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.decoder_layer import Block, DecoderLayer
from bulkrun.models.decoder.layers import Linear
from bulkrun.models.decoder.norms import NoNorm, RMSNorm
from bulkrun.models.decoder.residual_streams import AltUp, BetweenBlocks, Streams


class Laurel(nn.Module):
    """A learned residual of low rank (Menghani et al., arXiv 2411.07501)."""

    def __init__(self, config: DecoderConfig, altup: AltUpConfig) -> None:
        super().__init__()
        self.left_proj = Linear(config.hidden_size, altup.laurel_rank)
        self.right_proj = Linear(altup.laurel_rank, config.hidden_size)
        self.norm = RMSNorm(config, config.hidden_size)

    def forward(self, x_TE: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] -> [T, E]."""
        return self.norm(self.right_proj(self.left_proj(x_TE))).add_(x_TE)


class AltUpLayer(DecoderLayer):
    """The other streams are told of the layer's input by the next layer, and the blocks know of the first one alone."""

    def __init__(self, config: DecoderConfig, altup: AltUpConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.altup, self.laurel = AltUp(config, altup), Laurel(config, altup)

    def _blocks(self) -> Iterator[Block]:
        attention, mlp, inputs = super()._blocks()
        yield attention._replace(norm=BetweenBlocks(self._before_attention, first=self._predict))
        yield Block(BetweenBlocks(self._beside_attention), self.laurel, NoNorm())
        yield mlp._replace(norm=BetweenBlocks(self._before_mlp))
        yield inputs._replace(norm=BetweenBlocks(self._behind_mlp))

    def _before_attention(self, found_TE: torch.Tensor, streams: Streams) -> torch.Tensor:
        """What was found last was the input of the layer before."""
        streams.tell_others(found_TE)
        return self._predict(streams)

    def _predict(self, streams: Streams) -> torch.Tensor:
        streams.all_NTE = self.altup.predict(streams.all_NTE)
        streams.active_TE = streams.all_NTE[0]
        return self.input_norm(streams.active_TE)

    def _beside_attention(self, found_TE: torch.Tensor, streams: Streams) -> torch.Tensor:
        """The branch sees what attention saw."""
        seen_TE = self.input_norm(streams.active_TE)
        streams.active_TE = streams.active_TE + found_TE
        return seen_TE

    def _before_mlp(self, found_TE: torch.Tensor, streams: Streams) -> torch.Tensor:
        streams.active_TE = (streams.active_TE + found_TE).mul_(2.0**-0.5)
        return self.mlp_norm(streams.active_TE)

    def _behind_mlp(self, found_TE: torch.Tensor, streams: Streams) -> torch.Tensor:
        streams.all_NTE = self.altup.correct(streams.all_NTE, streams.active_TE + found_TE)
        return streams.all_NTE[0] * self.altup.output_scale
