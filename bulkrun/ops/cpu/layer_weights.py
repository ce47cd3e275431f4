"""What a compiled decoder's layers are made of (`layer_stack`): weights, what they share, the scratch they need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bulkrun.ops.cpu.attention_mixer import AttentionWeights
from bulkrun.ops.cpu.int8_linear import ROW_MULTIPLE
from bulkrun.ops.cpu.stack_memory import PAD, Matrix
from bulkrun.ops.cpu.state_mixers import StateWeights


class InputWeights(NamedTuple):
    """What takes in what a layer is told of each token anew, U numbers: a gate of the residual stream for them, what
    makes E of them, and the norm of that."""

    gate: Matrix
    out: Matrix
    out_norm: torch.Tensor  # [E]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: what mixes tokens in it, and gates and ups in one matrix, or whole words of ups alone.

    Norms that are None it has not, nor an MLP whose matrices are.
    """

    input_norm: torch.Tensor | None  # [E]
    mixer: AttentionWeights | StateWeights
    o: Matrix
    mixer_out_norm: torch.Tensor | None  # [E]
    mlp_norm: torch.Tensor | None = None  # [E]
    gate_up: Matrix | None = None
    down: Matrix | None = None
    intermediate_size: int = 0
    mlp_out_norm: torch.Tensor | None = None  # [E]
    inputs: InputWeights | None = None
    scale: float = 1.0  # of the residual stream behind the layer
    xielu: tuple[float, float] = (0.0, 0.0)  # factors of that activation
    input_bias: torch.Tensor | None = None  # [E], of a layer norm before the mixer
    mlp_bias: torch.Tensor | None = None  # [E], so too before the MLP

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Those that are read for every token."""
        of_inputs = () if self.inputs is None else (self.inputs.gate, self.inputs.out)
        found = (self.mixer.matrix, self.o, self.gate_up, self.down, *of_inputs)
        return tuple(matrix for matrix in found if matrix is not None)

    @property
    def is_full(self) -> bool:
        """Whether it makes keys, or a state, of every token."""
        return not isinstance(self.mixer, AttentionWeights) or self.mixer.has_own_keys


@dataclass(frozen=True, slots=True)
class StackSizes:
    """The settings that all layers share."""

    hidden_size: int
    num_heads: int
    eps: float
    scale: float
    soft_cap: float | None
    residual_multiplier: float  # of what mixer and MLP add to the residual stream
    activation: str  # one of ACTIVATIONS
    is_layer_norm: bool  # else norms are of root mean squares
    is_causal: bool
    dtype: torch.dtype  # of what goes through them, and of weights that are not int8
    is_beside: bool = False  # each MLP stands beside its mixer, behind a norm of what that stands behind
    has_mlp_gates: bool = True
    gates_attention: bool = False  # what it gives is multiplied by the sigmoid of gates, which queries come behind
    input_size: int = 0  # of what layers are told of each token anew; 0: nothing


class Heads(NamedTuple):
    """Those of a layer's keys."""

    num_kv_heads: int
    head_dim: int


def widest(layers: Sequence[LayerWeights], sizes: StackSizes) -> int:
    """Numbers in the longest row that is multiplied."""
    attention, with_states = _mixers(layers)
    widths = [sizes.num_heads * one.head_dim for one in attention] + [one.mixed_size for one in with_states]
    return max(sizes.hidden_size, *widths, *(layer.intermediate_size for layer in layers))


def row_sizes(layers: Sequence[LayerWeights], sizes: StackSizes) -> dict[str, int]:
    """Numbers in a row of each scratch buffer; those that are multiplied are padded."""
    attention, with_states = _mixers(layers)
    width, most = sizes.num_heads * max((one.head_dim for one in attention), default=0), widest(layers, sizes)
    qkv = max(((sizes.num_heads + 2 * one.num_kv_heads) * one.head_dim for one in attention), default=0)
    inner = max(sizes.input_size, *(layer.intermediate_size for layer in layers))
    rows = {
        "x": sizes.hidden_size + -sizes.hidden_size % PAD,
        "qkv": 0 if sizes.gates_attention else qkv,
        "q": width,
        "attended": width + -width % PAD,
        "projected": width + qkv if sizes.gates_attention else 0,
        "out": sizes.hidden_size,
        "gated": inner + -inner % PAD,
        "bytes": (most + -most % ROW_MULTIPLE) // sizes.dtype.itemsize,
        "row_scales": 4 // sizes.dtype.itemsize,
    }
    for one in with_states:
        rows |= {name: max(size, rows.get(name, 0)) for name, size in one.scratch.items()}
    return rows


def _mixers(layers: Sequence[LayerWeights]) -> tuple[list[AttentionWeights], list[StateWeights]]:
    mixers = [layer.mixer for layer in layers]
    attention = [mixer for mixer in mixers if isinstance(mixer, AttentionWeights)]
    return attention, [mixer for mixer in mixers if not isinstance(mixer, AttentionWeights)]
