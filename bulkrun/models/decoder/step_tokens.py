"""What a decoder's blocks are given beside hidden states, for all tokens of a step or for those alone that go on."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.decoder.attention import Rotary
from bulkrun.models.decoder.decoder_layer import Block
from bulkrun.ops import AttentionMetadata


class StepTokens(NamedTuple):
    """T tokens of a step."""

    rotaries: dict[RopeConfig | None, Rotary]
    inputs_LTU: torch.Tensor | None  # each layer's own of each token (`layer_inputs`)
    meta: AttentionMetadata

    @property
    def has_growth(self) -> bool:
        """Whether queries of some layers are multiplied by what grows with positions."""
        return any(rotary.query_growth is not None for rotary in self.rotaries.values())

    @property
    def turns(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines of each rotary embedding."""
        pairs = [(rotary.cos, rotary.sin) for rotary in self.rotaries.values()]
        return [(cos, sin) for cos, sin in pairs if cos is not None and sin is not None]

    def beside(self, block: Block) -> Any:
        """What the block's module takes after the hidden states: its layer's inputs, or its rotary embedding."""
        if block.layer is not None and self.inputs_LTU is not None:
            return self.inputs_LTU[block.layer]
        return self.rotaries.get(block.rope)

    def only(self, indices: torch.Tensor) -> StepTokens:
        """These alone (int64 [S], ascending), which look at keys that are there."""
        rotaries = {rope: rotary.of_tokens(indices) for rope, rotary in self.rotaries.items()}
        inputs_LTU = None if self.inputs_LTU is None else self.inputs_LTU[:, indices]
        return StepTokens(rotaries, inputs_LTU, self.meta.of_tokens(indices))
