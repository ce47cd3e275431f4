"""The layers of an encoder of BERT's kind: attention in both directions, a plain MLP, and a layer norm after each.

Vaswani et al. 2017, Devlin et al. 2019; biases by distance as in MPNet (Song et al. 2020), after Raffel et al. 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

M = TypeVar("M")
N = TypeVar("N")


class Norm(NamedTuple):
    """A layer norm's weight [E] and bias [E]."""

    weight: torch.Tensor
    bias: torch.Tensor


class PlainMatrix(NamedTuple):
    """A weight [O, I] and a bias [O]."""

    weight: torch.Tensor
    bias: torch.Tensor


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
        return EncoderLayer(
            *map(change, (self.qkv, self.o, self.up, self.down)), self.attention_norm, self.mlp_norm
        )  # fmt: skip


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
    x_TE: torch.Tensor, lens: Sequence[int], layers: Iterable[EncoderLayer[PlainMatrix]], sizes: EncoderSizes
) -> torch.Tensor:
    """Hidden states [T, E] of texts of so many tokens each, one behind the other, from their embeddings x_TE."""
    for layer in layers:
        qkv_T3HD = F.linear(x_TE, *layer.qkv).unflatten(-1, (3, sizes.num_heads, sizes.head_dim))
        attended_TE = torch.cat([_attend(text, sizes) for text in qkv_T3HD.split(list(lens))])
        x_TE = _norm(F.linear(attended_TE, *layer.o) + x_TE, layer.attention_norm, sizes.eps)
        up_TI = F.gelu(F.linear(x_TE, *layer.up), approximate="tanh" if sizes.activation == "gelu_tanh" else "none")
        x_TE = _norm(F.linear(up_TI, *layer.down) + x_TE, layer.mlp_norm, sizes.eps)
    return x_TE


def _attend(qkv_L3HD: torch.Tensor, sizes: EncoderSizes) -> torch.Tensor:
    """Each token of a text over all of it: [L, E]."""
    mask_HLL = None
    if sizes.distance_bias is not None:
        places = torch.arange(len(qkv_L3HD))
        distances_LL = places - places[:, None] + sizes.distance_bias.shape[1] // 2
        mask_HLL = sizes.distance_bias[:, distances_LL].to(qkv_L3HD.dtype)
    q_HLD, k_HLD, v_HLD = qkv_L3HD.permute(1, 2, 0, 3)
    attended_HLD = F.scaled_dot_product_attention(q_HLD, k_HLD, v_HLD, attn_mask=mask_HLL)
    return attended_HLD.transpose(0, 1).flatten(1)


def _norm(x_TE: torch.Tensor, norm: Norm, eps: float) -> torch.Tensor:
    return F.layer_norm(x_TE, x_TE.shape[-1:], norm.weight, norm.bias, eps)
