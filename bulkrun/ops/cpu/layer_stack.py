"""Every layer of a decoder over a step in one compiled call. Knows weights and sizes; knows no module.

Between the ops of a narrow step more time goes by than in them. Here a layer has norms before attention and MLP, after
them or both, and a dense gated MLP; its weights are in panels of columns (panels.h), which the call reads from end to
end: the panels that products op by op read (`panel_linear`), or a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu import panel_matrix, structs
from bulkrun.ops.cpu.dtypes import is_cache_dtype, suffix
from bulkrun.ops.cpu.int8_linear import ROW_MULTIPLE
from bulkrun.ops.cpu.library import c_number, library
from bulkrun.ops.cpu.panel_linear import PANEL
from bulkrun.ops.cpu.stack_memory import PAD, Matrix, StackMemory, padded, set_kept, set_step
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.matmul.weight_kinds import values_of

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")  # in the order of layer_stack.cpp
MAX_COPIED_TOKENS = 256  # from here on torch's products are as fast, and little goes by between them


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: queries, keys and values in one matrix, gates and ups in another. Norms that are None it has not."""

    input_norm: torch.Tensor | None  # [E]
    qkv: Matrix
    qk_norm: torch.Tensor | None  # [H + K, D], of each head by itself
    projection_norms: tuple[torch.Tensor, torch.Tensor] | None  # [H D], [K D], of all queries as one and of all keys
    o: Matrix
    attention_out_norm: torch.Tensor | None  # [E]
    mlp_norm: torch.Tensor | None  # [E]
    gate_up: Matrix
    down: Matrix
    mlp_out_norm: torch.Tensor | None  # [E]
    sliding_window: int | None
    rotary: int | None  # which of the step's rotary embeddings


@dataclass(frozen=True, slots=True)
class StackSizes:
    """The settings that all layers share."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    soft_cap: float | None
    residual_multiplier: float  # of what attention and MLP add to the residual stream
    activation: str  # one of ACTIVATIONS
    is_layer_norm: bool  # else norms are of root mean squares
    is_causal: bool
    dtype: torch.dtype  # of what goes through them, and of weights that are not int8


class _Layer(ctypes.Structure):
    _fields_ = (
        *[(x, panel_matrix.Matrix) for x in ("qkv", "o", "gate_up", "down")],
        *[(x, c_void_p) for x in ("input_norm", "mlp_norm", "attention_out_norm", "mlp_out_norm")],
        *[(x, c_void_p) for x in ("qk_norm", "q_norm", "k_norm", "k_cache", "v_cache")],
        *[(x, c_int64) for x in ("window", "rotary")],
    )


class _Rotary(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64))


_CONSTANTS = ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
_SCRATCH = ("q", "attended", "x", "qkv", "out", "gated", "bytes", "row_scales")
_TOKEN_SCRATCH = ("q", "attended")
_STEP = ("slots", "kv_copies", "kept", "block_tables", "context_lens", "cu_seqlens_q")


class _Stack(ctypes.Structure):
    """`struct Stack` of layer_stack.cpp."""

    _fields_ = (
        *[(x, c_void_p) for x in ("layers", "rotaries", "last_norm", "residual", "hidden", *_SCRATCH, *_STEP)],
        *[(x, c_int64) for x in ("num_layers", "num_tokens", "num_seqs", "table_width", "num_copies", "num_kept")],
        *[(x, c_int64) for x in (*_CONSTANTS, "block_size")],
        *[(x, c_float) for x in ("eps", "scale", "soft_cap", "residual_multiplier")],
        *[(x, c_int32) for x in ("activation", "is_layer_norm", "sees_later", "has_fp8_cache", "num_threads")],
    )


def can_stack(sizes: StackSizes, norm_dtype: torch.dtype) -> bool:
    """Whether it is compiled for such layers; the first call may compile."""
    ops, names = library(), suffix(sizes.dtype, norm_dtype)
    if ops is None or names is None or not hasattr(ops, f"layer_stack_{names}"):
        return False
    heads_per_kv_head = sizes.num_heads // sizes.num_kv_heads
    return sizes.head_dim <= c_number("max_head_dim") and heads_per_kv_head <= c_number("max_heads_per_kv_head")


class LayerStack:
    """The layers and the norm after them, their weights in panels; not for two calls at a time."""

    def __init__(self, layers: Sequence[LayerWeights], last_norm: torch.Tensor, sizes: StackSizes) -> None:
        self._memory = StackMemory(sizes.dtype, _row_sizes(sizes), _TOKEN_SCRATCH)  # what the tables below point to
        self._layers = (_Layer * len(layers))(*[self._layer(layer, sizes) for layer in layers])
        self._rotaries = (_Rotary * (1 + max(-1 if layer.rotary is None else layer.rotary for layer in layers)))()
        self._stack = _Stack(
            layers=ctypes.addressof(self._layers), rotaries=ctypes.addressof(self._rotaries),
            last_norm=self._memory.keep(last_norm), num_layers=len(layers), eps=sizes.eps, scale=sizes.scale,
            soft_cap=sizes.soft_cap or 0.0, residual_multiplier=sizes.residual_multiplier,
            activation=ACTIVATIONS.index(sizes.activation), is_layer_norm=sizes.is_layer_norm,
            sees_later=not sizes.is_causal,
            **{name: getattr(sizes, name) for name in _CONSTANTS},
        )  # fmt: skip
        matrices = [matrix for layer in layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        self._max_tokens = None if all(map(_is_packed, matrices)) else MAX_COPIED_TOKENS
        self._run: Callable[..., None] = structs.struct_function(
            f"layer_stack_{suffix(sizes.dtype, last_norm.dtype)}", _Stack, _Layer, panel_matrix.Matrix, _Rotary
        )

    @property
    def takes_any_width(self) -> bool:
        """Whether steps of all widths go through it: then a row's bits depend on its own sequence alone."""
        return self._max_tokens is None

    def takes(self, residual_TE: torch.Tensor, kv_dtype: torch.dtype) -> bool:
        """Whether it can do a step with such embeddings over such a cache, as fast as the ops one by one."""
        fits = self._max_tokens is None or residual_TE.shape[0] <= self._max_tokens
        return fits and is_cache_dtype(kv_dtype, residual_TE.dtype)

    def __call__(
        self,
        residual_TE: torch.Tensor,
        rotaries: Sequence[tuple[torch.Tensor, torch.Tensor]],
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        meta: AttentionMetadata,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the tokens' keys and values to the caches.

        residual_TE: contiguous embeddings, changed in place. rotaries: cosines and sines [T, 1, R], see `apply_rotary`.
        k_caches, v_caches: [N, B, K, D] contiguous, one per layer, all of the layers' dtype or all of fp8. kept: int64
        [S], ascending: only these tokens go on after the last layer's keys and values, and come out, [S, E].
        """
        assert residual_TE.is_contiguous() and self.takes(residual_TE, k_caches[0].dtype)
        hidden_TE = torch.empty_like(residual_TE if kept is None else residual_TE[: len(kept)])
        for layer, k_cache, v_cache in zip(self._layers, k_caches, v_caches, strict=True):
            layer.k_cache, layer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
        for entry, (cos, sin) in zip(self._rotaries, rotaries, strict=True):
            entry.cos, entry.sin, entry.dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        stack = self._stack
        stack.residual, stack.hidden, stack.num_tokens = residual_TE.data_ptr(), hidden_TE.data_ptr(), len(residual_TE)
        stack.block_size, stack.num_threads = k_caches[0].shape[1], torch.get_num_threads()
        stack.has_fp8_cache = k_caches[0].dtype == FP8
        self._memory.make_room(stack, len(residual_TE))
        set_step(stack, meta)
        self._set_copies(meta.kv_copies)
        set_kept(stack, kept, len(residual_TE))
        self._run(ctypes.byref(stack))
        return hidden_TE

    def _set_copies(self, copies: torch.Tensor | None) -> None:
        assert copies is None or copies.is_contiguous()
        stack = self._stack
        stack.kv_copies, stack.num_copies = (None, 0) if copies is None else (copies.data_ptr(), copies.shape[1])

    def _layer(self, layer: LayerWeights, sizes: StackSizes) -> _Layer:
        q_norm, k_norm = layer.projection_norms or (None, None)
        norms = {
            "input_norm": layer.input_norm, "mlp_norm": layer.mlp_norm, "qk_norm": layer.qk_norm,
            "attention_out_norm": layer.attention_out_norm, "mlp_out_norm": layer.mlp_out_norm,
            "q_norm": q_norm, "k_norm": k_norm,
        }  # fmt: skip
        memory = self._memory
        return _Layer(
            qkv=memory.matrix(layer.qkv), o=memory.matrix(layer.o), down=memory.matrix(layer.down),
            gate_up=memory.matrix(_padded_halves(layer.gate_up, sizes.intermediate_size)),
            **{name: None if norm is None else memory.keep(norm) for name, norm in norms.items()},
            window=layer.sliding_window or 0, rotary=-1 if layer.rotary is None else layer.rotary,
        )  # fmt: skip


def _is_packed(matrix: Matrix) -> bool:
    return values_of(matrix.weight).ndim == 4


def _padded_halves(gate_up: Matrix, size: int) -> Matrix:
    """Gates in whole panels, and ups."""
    if size % PANEL == 0:
        return gate_up
    weight, bias = gate_up
    assert isinstance(weight, torch.Tensor) and weight.ndim == 2, "in panels gates and ups can not be moved apart"
    halves = [torch.cat([padded(half) for half in rows.split(size)]) for rows in (weight, bias) if rows is not None]
    return Matrix(halves[0], halves[1] if len(halves) > 1 else None)


def _row_sizes(sizes: StackSizes) -> dict[str, int]:
    """Numbers in a row of each scratch buffer; those that are multiplied are padded."""
    width = sizes.num_heads * sizes.head_dim
    widest = max(sizes.hidden_size, width, sizes.intermediate_size)
    return {
        "x": sizes.hidden_size + -sizes.hidden_size % PAD,
        "qkv": width + 2 * sizes.num_kv_heads * sizes.head_dim,
        "q": width,
        "attended": width + -width % PAD,
        "out": sizes.hidden_size,
        "gated": sizes.intermediate_size + -sizes.intermediate_size % PAD,
        "bytes": (widest + -widest % ROW_MULTIPLE) // sizes.dtype.itemsize,
        "row_scales": 4 // sizes.dtype.itemsize,
    }
