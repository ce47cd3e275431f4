"""Per-layer embeddings (Gemma 3n and 4): what each layer is told of a token anew, and the block that takes it in.

They are another table, as wide as all layers together, and a projection of the first layer's embeddings.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun.models.config.layer_inputs import LayerInputs
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.layers import Linear, empty_parameter
from bulkrun.models.decoder.norms import RMSNorm


class LayerInputEmbedding(nn.Module):
    """Token ids and embeddings in, the inputs of all layers out."""

    def __init__(self, config: DecoderConfig, inputs: LayerInputs) -> None:
        super().__init__()
        width = config.num_layers * inputs.size
        self.weight = empty_parameter(inputs.vocab_size, width)
        self.projection = Linear(config.hidden_size, width)
        self.norm = RMSNorm(config, inputs.size)
        self.size, self.vocab_size = inputs.size, inputs.vocab_size
        self.is_for_all = inputs.vocab_size >= config.vocab_size
        self.projection_scale = config.hidden_size**-0.5

    def forward(self, input_ids_T: torch.Tensor, embeds_TE: torch.Tensor) -> torch.Tensor:
        """[T] and [T, E] -> [layers, T, U]."""
        projected_TLU = (self.projection(embeds_TE) * self.projection_scale).unflatten(-1, (-1, self.size))
        if not self.is_for_all:
            input_ids_T = torch.where(input_ids_T < self.vocab_size, input_ids_T, 0)
        table_TLU = F.embedding(input_ids_T, self.weight).to(embeds_TE.dtype).view(projected_TLU.shape)
        scale = torch.tensor(self.size**0.5, dtype=embeds_TE.dtype).item()  # rounded as the embeddings are
        mixed_TLU = self.norm(projected_TLU).add_(table_TLU.mul_(scale)).mul_(2.0**-0.5)
        return mixed_TLU.transpose(0, 1).contiguous()


class LayerInputMLP(nn.Module):
    """A gate of the residual stream, and the layer's input in the place of ups."""

    def __init__(self, config: DecoderConfig, inputs: LayerInputs) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, inputs.size)
        self.out_proj = Linear(inputs.size, config.hidden_size)

    def forward(self, x_TE: torch.Tensor, input_TU: torch.Tensor, *_step: object) -> torch.Tensor:
        """[T, E] of the residual stream as it is, and [T, U] -> [T, E]."""
        return self.out_proj(F.gelu(self.gate_proj(x_TE), approximate="tanh").mul_(input_TU))
