"""Which modules of a transformer that transformers runs are the layers of an encoder of BERT's kind.

Told by their names, which models share that were written after one another; whether they are put together in the same
way too is for the caller to find out, with numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.ops.encoder_layers import EncoderLayer, EncoderSizes, Norm, PlainMatrix


@dataclass(frozen=True, slots=True)
class _Names:
    """Of the list of layers in a model, and of the parts in a layer."""

    layers: str
    qkv: tuple[str, str, str]
    o: str
    attention_norm: str
    up: str
    activation: str
    down: str
    mlp_norm: str


_BERT = _Names(
    "encoder.layer",
    ("attention.self.query", "attention.self.key", "attention.self.value"),
    "attention.output.dense",
    "attention.output.LayerNorm",
    "intermediate.dense",
    "intermediate.intermediate_act_fn",
    "output.dense",
    "output.LayerNorm",
)
_MPNET = _Names(
    "encoder.layer",
    ("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    "attention.attn.o",
    "attention.LayerNorm",
    "intermediate.dense",
    "intermediate.intermediate_act_fn",
    "output.dense",
    "output.LayerNorm",
)
_DISTILBERT = _Names(
    "transformer.layer",
    ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    "attention.out_lin",
    "sa_layer_norm",
    "ffn.lin1",
    "ffn.activation",
    "ffn.lin2",
    "output_layer_norm",
)


@dataclass(frozen=True, slots=True)
class EncoderModules:
    """The layers, and the parts of each that hold its weights."""

    layers: list[EncoderLayer[PlainMatrix]]
    sizes: EncoderSizes


def find_layers(model: nn.Module, config: ModelConfig) -> EncoderModules | None:
    """The weights of such a model's layers, shared with it; None where its modules are called otherwise.

    Queries, keys and values of a layer share one piece of memory afterwards.
    """
    for names in (_BERT, _MPNET, _DISTILBERT):
        try:
            layers = list(model.get_submodule(names.layers).children())
            weights = [_weights(layer, names) for layer in layers]
            activation = _activation(layers[0].get_submodule(names.activation))
            eps = {_eps(layer, norm) for layer in layers for norm in (names.attention_norm, names.mlp_norm)}
        except (AttributeError, IndexError):
            continue
        if activation is None or len(eps) > 1 or config.num_kv_heads * config.head_dim != config.hidden_size:
            return None
        bias = _distance_bias(model.get_submodule("encoder"), config) if names is _MPNET else None
        return EncoderModules(weights, EncoderSizes(config.num_kv_heads, config.head_dim, eps.pop(), activation, bias))
    return None


def _eps(layer: nn.Module, name: str) -> float:
    norm: Any = layer.get_submodule(name)
    return float(norm.eps)


def _weights(layer: nn.Module, names: _Names) -> EncoderLayer[PlainMatrix]:
    """Raises AttributeError where a part, or its bias, is not there, and for a layer with weights beside them.

    Longformer has such: its windows do not show in texts that are shorter.
    """
    norms, products = (names.attention_norm, names.mlp_norm), (*names.qkv, names.o, names.up, names.down)
    known = {f"{part}.{kind}" for part in (*norms, *products) for kind in ("weight", "bias")}
    if not known.issuperset(name for name, _ in layer.named_parameters()):
        raise AttributeError("it has more parts")
    return EncoderLayer(
        qkv=_joined([layer.get_submodule(name) for name in names.qkv]),
        o=_matrix(layer.get_submodule(names.o)),
        attention_norm=_norm(layer.get_submodule(names.attention_norm)),
        up=_matrix(layer.get_submodule(names.up)),
        down=_matrix(layer.get_submodule(names.down)),
        mlp_norm=_norm(layer.get_submodule(names.mlp_norm)),
    )


def _matrix(module: nn.Module) -> PlainMatrix:
    if type(module) is not nn.Linear or module.bias is None:
        raise AttributeError("no nn.Linear with a bias")
    return PlainMatrix(module.weight.data, module.bias.data)


def _joined(modules: list[nn.Module]) -> PlainMatrix:
    """One below the other; the modules' weights become parts of it."""
    weight = torch.cat([_matrix(module).weight for module in modules])
    bias = torch.cat([_matrix(module).bias for module in modules])
    for module, part in zip(modules, weight.chunk(len(modules)), strict=True):
        module.weight.data = part
    return PlainMatrix(weight, bias)


def _norm(module: nn.Module) -> Norm:
    if type(module) is not nn.LayerNorm or module.bias is None:
        raise AttributeError("no nn.LayerNorm with a bias")
    return Norm(module.weight.data, module.bias.data)


def _activation(function: Callable[[torch.Tensor], torch.Tensor]) -> Literal["gelu", "gelu_tanh"] | None:
    """Which of the two it is, by what it does: it has a dozen names."""
    x = torch.linspace(-6, 6, 121)
    if torch.allclose(function(x), F.gelu(x), rtol=0, atol=1e-6):
        return "gelu"
    return "gelu_tanh" if torch.allclose(function(x), F.gelu(x, approximate="tanh"), rtol=0, atol=1e-6) else None


def _distance_bias(encoder: nn.Module, config: ModelConfig) -> torch.Tensor:
    """float32 [H, 2 M + 1] for all distances within a text of the model's positions."""
    states_1LE = torch.empty(1, config.max_position_embeddings, 1, device=next(encoder.parameters()).device)
    bias_HLL: torch.Tensor = encoder.compute_position_bias(states_1LE)[0]  # type: ignore[operator]
    return torch.cat([bias_HLL[:, 1:, 0].flip(-1), bias_HLL[:, 0]], dim=-1).float()
