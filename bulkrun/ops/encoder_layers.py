"""The layers of an encoder of BERT's kind: attention in both directions, a plain MLP, and a layer norm after each.

Vaswani et al. 2017, Devlin et al. 2019; biases by distance as in MPNet (Song et al. 2020), after Raffel et al. 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from bulkrun import ops
from bulkrun.ops import TextLens

Product = Callable[[torch.Tensor], torch.Tensor]  # [T, I] -> [T, O]
M = TypeVar("M")
N = TypeVar("N")


class Norm(NamedTuple):
    """A layer norm's weight [E] and bias [E]."""

    weight: torch.Tensor
    bias: torch.Tensor


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A weight [O, I] and a bias [O]."""

    weight: torch.Tensor
    bias: torch.Tensor

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product, [T, O]."""
        return F.linear(x_TI, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class EncoderLayer(Generic[M]):
    """One layer, of plain matrices or of others; queries, keys and values are one of [3 H D, E]."""

    qkv: M
    o: M
    up: M
    down: M
    attention_norm: Norm
    mlp_norm: Norm

    def map(self, change: Callable[[M], N]) -> EncoderLayer[N]:
        """The same with other matrices."""
        qkv, o, up, down = map(change, (self.qkv, self.o, self.up, self.down))
        return EncoderLayer(qkv, o, up, down, self.attention_norm, self.mlp_norm)


@dataclass(frozen=True, slots=True)
class EncoderSizes:
    """What all layers share."""

    num_heads: int
    head_dim: int
    eps: float
    activation: Literal["gelu", "gelu_tanh"]
    # [H, 2 M + 1] float32: added to a score by how far the key is behind the query, -M to M; texts have at most M + 1
    distance_bias: torch.Tensor | None = None


def encode(
    x_TE: torch.Tensor, texts: TextLens, layers: Iterable[EncoderLayer[Product]], sizes: EncoderSizes
) -> torch.Tensor:
    """Hidden states [T, E] of texts, one behind the other, from their embeddings x_TE."""
    for layer in layers:
        x_TE = encode_layer(x_TE, texts, layer, sizes)
    return x_TE


def encode_layer(
    x_TE: torch.Tensor,
    texts: TextLens,
    layer: EncoderLayer[Product],
    sizes: EncoderSizes,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """One layer: [T, E] -> [T, E]. kept: int64 [S]: only these tokens go on behind the attention, [S, E]."""
    q_THD, k_THD, v_THD = layer.qkv(x_TE).unflatten(-1, (3, sizes.num_heads, sizes.head_dim)).unbind(1)
    attended_TE = ops.packed_attention(
        q_THD, k_THD, v_THD, texts, scale=sizes.head_dim**-0.5, distance_bias=sizes.distance_bias
    ).flatten(1)
    if kept is not None:
        attended_TE, x_TE = attended_TE[kept], x_TE[kept]
    x_TE = ops.add_layer_norm(layer.o(attended_TE), x_TE, *layer.attention_norm, sizes.eps)
    up_TI = F.gelu(layer.up(x_TE), approximate="tanh" if sizes.activation == "gelu_tanh" else "none")
    return ops.add_layer_norm(layer.down(up_TI), x_TE, *layer.mlp_norm, sizes.eps)
