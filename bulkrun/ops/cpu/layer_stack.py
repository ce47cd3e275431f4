"""Every layer of a decoder over a step in one compiled call. Knows weights and sizes; knows no module.

Between the ops of a narrow step more time goes by than in them. Here a layer has attention (`attention_mixer`) or what
keeps a state (`state_mixers`), and a dense MLP or none, with norms before them, after them or both; its weights are in
panels of columns (panels.h), which the call reads from end to end: the panels that products op by op read
(`panel_linear`), or a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu import panel_matrix, structs
from bulkrun.ops.cpu.attention_mixer import AttentionLayer, AttentionWeights
from bulkrun.ops.cpu.dtypes import cache_format, suffix
from bulkrun.ops.cpu.layer_weights import Heads, LayerWeights, StackSizes, row_sizes, widest
from bulkrun.ops.cpu.library import c_number, library
from bulkrun.ops.cpu.panel_linear import PANEL
from bulkrun.ops.cpu.stack_memory import LANES, Matrix, StackMemory, padded, set_kept, set_step
from bulkrun.ops.cpu.state_mixers import DeltaNetLayer, Mamba2Layer, MambaLayer, ShortConvLayer, StateWeights
from bulkrun.ops.matmul.weight_kinds import values_of

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2", "xielu")  # in the order of layer_stack.cpp
MAX_COPIED_TOKENS = 256  # from here on torch's products are as fast, and little goes by between them


class _Layer(ctypes.Structure):
    _fields_ = (
        ("mixer", c_void_p),
        ("mixer_kind", c_int64),
        *[(x, panel_matrix.Matrix) for x in ("o", "gate_up", "down")],
        *[(x, c_void_p) for x in ("input_norm", "mlp_norm", "mixer_out_norm", "mlp_out_norm")],
        *[(x, c_void_p) for x in ("input_bias", "mlp_bias")],
        *[(x, panel_matrix.Matrix) for x in ("input_gate", "input_out")],
        ("input_out_norm", c_void_p),
        ("intermediate_size", c_int64),
        *[(x, c_float) for x in ("scale", "above", "below")],
    )


class _Rotary(ctypes.Structure):
    _fields_ = (("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64))


_CONSTANTS = ("hidden_size", "num_heads", "head_dim", "input_size")
_MODEL = ("layers", "rotaries", "last_norm", "last_bias")
_TOKEN_SCRATCH = ("q", "attended", "projected", "narrow", "convolved", "corrected")
_SCRATCH = (*_TOKEN_SCRATCH, "x", "qkv", "out", "gated", "steps", "bytes", "row_scales")
_STEP = ("slots", "rows", "kv_copies", "kept", "block_tables", "context_lens", "cu_seqlens_q")


class _Stack(ctypes.Structure):
    """`struct Stack` of layer_stack.h."""

    _fields_ = (
        *[(x, c_void_p) for x in (*_MODEL, "inputs", "residual", "hidden", *_SCRATCH, *_STEP)],
        *[(x, c_int64) for x in ("num_layers", "num_tokens", "num_seqs", "table_width", "num_copies", "num_kept")],
        *[(x, c_int64) for x in (*_CONSTANTS, "block_size", "widest", "widest_gated", "last_full")],
        *[(x, c_float) for x in ("eps", "scale", "soft_cap", "residual_multiplier")],
        *[(x, c_int32) for x in ("activation", "is_layer_norm", "is_beside", "has_mlp_gates", "gates_attention")],
        *[(x, c_int32) for x in ("sees_later", "cache_format", "num_threads")],
    )


def can_stack(sizes: StackSizes, norm_dtype: torch.dtype, heads: Iterable[Heads]) -> bool:
    """Whether it is compiled for such layers, with these heads of keys; the first call may compile."""
    ops, names = library(), suffix(sizes.dtype, norm_dtype)
    if ops is None or names is None or not hasattr(ops, f"layer_stack_{names}"):
        return False
    if sizes.is_layer_norm and sizes.hidden_size % LANES:
        return False
    most_dims, most_heads = c_number("max_head_dim"), c_number("max_heads_per_kv_head")
    return all(dims <= most_dims and sizes.num_heads // kv_heads <= most_heads for kv_heads, dims in heads)


class LayerStack:
    """The layers and the norm after them, their weights in panels; not for two calls at a time."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        last_norm: torch.Tensor,
        sizes: StackSizes,
        last_bias: torch.Tensor | None = None,
    ) -> None:
        mixers = [layer.mixer for layer in layers]
        rows = row_sizes(layers, sizes)
        self._memory = StackMemory(sizes.dtype, rows, _TOKEN_SCRATCH)  # tables point there
        self._mixers = [mixer.table(self._memory) for mixer in mixers]
        tables = [self._layer(*pair) for pair in zip(layers, self._mixers, strict=True)]
        self._layers = (_Layer * len(layers))(*tables)
        self._rotaries = (_Rotary * (1 + max(_rotary_of(mixer) for mixer in mixers)))()
        self._stack = _Stack(
            layers=ctypes.addressof(self._layers), rotaries=ctypes.addressof(self._rotaries),
            last_norm=self._memory.keep(last_norm), num_layers=len(layers), widest=widest(layers, sizes),
            last_bias=None if last_bias is None else self._memory.keep(last_bias), widest_gated=rows["gated"],
            head_dim=max((one.head_dim for one in mixers if isinstance(one, AttentionWeights)), default=0),
            last_full=max(i for i, layer in enumerate(layers) if layer.is_full),
            eps=sizes.eps, scale=sizes.scale, soft_cap=sizes.soft_cap or 0.0,
            residual_multiplier=sizes.residual_multiplier, activation=ACTIVATIONS.index(sizes.activation),
            is_layer_norm=sizes.is_layer_norm, is_beside=sizes.is_beside, has_mlp_gates=sizes.has_mlp_gates,
            gates_attention=sizes.gates_attention, sees_later=not sizes.is_causal,
            **{name: getattr(sizes, name) for name in _CONSTANTS if name != "head_dim"},
        )  # fmt: skip
        are_packed = all(_is_packed(matrix) for layer in layers for matrix in layer.matrices)
        self._max_tokens = None if are_packed else MAX_COPIED_TOKENS
        self._run: Callable[..., None] = structs.struct_function(
            f"layer_stack_{suffix(sizes.dtype, last_norm.dtype)}", _Stack, _Layer, AttentionLayer, DeltaNetLayer,
            ShortConvLayer, Mamba2Layer, MambaLayer, panel_matrix.Matrix, _Rotary,
        )  # fmt: skip

    @property
    def takes_any_width(self) -> bool:
        """Whether steps of all widths go through it: then a row's bits depend on its own sequence alone."""
        return self._max_tokens is None

    def takes(self, residual_TE: torch.Tensor, kv_dtype: torch.dtype) -> bool:
        """Whether it can do a step with such embeddings over such a cache, as fast as the ops one by one."""
        fits = self._max_tokens is None or residual_TE.shape[0] <= self._max_tokens
        return fits and cache_format(kv_dtype, residual_TE.dtype) is not None

    def __call__(
        self,
        residual_TE: torch.Tensor,
        rotaries: Sequence[tuple[torch.Tensor, torch.Tensor]],
        k_caches: Sequence[torch.Tensor],
        v_caches: Sequence[torch.Tensor],
        meta: AttentionMetadata,
        kept: torch.Tensor | None = None,
        states: Sequence[Sequence[torch.Tensor]] = (),
        inputs_LTU: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the tokens' keys and values to the caches, and the states.

        residual_TE: contiguous embeddings, changed in place. rotaries: cosines and sines [T, 1, R], see `apply_rotary`.
        k_caches, v_caches: [N, B, K, D] contiguous, one per layer that attends, all of one dtype that `takes` knows.
        kept: int64 [S], ascending: only these tokens go on after the last layer that makes keys or states has mixed,
        and come out, [S, E].
        states: of each layer that keeps some; [R, W - 1, C] of the layers' dtype, and where heads have matrices
        [R, H, D, V] of float32, contiguous. inputs_LTU: contiguous, where layers are told of tokens anew.
        """
        assert residual_TE.is_contiguous() and all(self.takes(residual_TE, cache.dtype) for cache in k_caches[:1])
        hidden_TE = torch.empty_like(residual_TE if kept is None else residual_TE[: len(kept)])
        self._set_caches(k_caches, v_caches)
        self._set_states(states, meta)
        for entry, (cos, sin) in zip(self._rotaries, rotaries, strict=True):
            entry.cos, entry.sin, entry.dim = cos.data_ptr(), sin.data_ptr(), cos.shape[-1]
        stack = self._stack
        stack.residual, stack.hidden, stack.num_tokens = residual_TE.data_ptr(), hidden_TE.data_ptr(), len(residual_TE)
        stack.num_threads = torch.get_num_threads()
        self._memory.make_room(stack, len(residual_TE))
        set_step(stack, meta)
        self._set_copies(meta.kv_copies)
        self._set_inputs(inputs_LTU)
        set_kept(stack, kept, len(residual_TE))
        self._run(ctypes.byref(stack))
        return hidden_TE

    def _set_caches(self, k_caches: Sequence[torch.Tensor], v_caches: Sequence[torch.Tensor]) -> None:
        attention = [mixer for mixer in self._mixers if isinstance(mixer, AttentionLayer)]
        for mixer, k_cache, v_cache in zip(attention, k_caches, v_caches, strict=True):
            mixer.k_cache, mixer.v_cache = k_cache.data_ptr(), v_cache.data_ptr()
            self._stack.block_size = k_cache.shape[1]
            self._stack.cache_format = cache_format(k_cache.dtype, self._memory.dtype)

    def _set_states(self, states: Sequence[Sequence[torch.Tensor]], meta: AttentionMetadata) -> None:
        with_states, rows_S = [mixer for mixer in self._mixers if mixer.states], meta.rows_S
        for mixer, tensors in zip(with_states, states, strict=True):
            for name, tensor in zip(mixer.states, tensors, strict=True):
                assert tensor.is_contiguous() and tensor.dtype in (self._memory.dtype, torch.float32)
                setattr(mixer, name, tensor.data_ptr())
        assert not with_states or (rows_S is not None and rows_S.is_contiguous()), "each sequence has a row of states"
        self._stack.rows = None if rows_S is None else rows_S.data_ptr()

    def _set_copies(self, copies: torch.Tensor | None) -> None:
        assert copies is None or copies.is_contiguous()
        stack = self._stack
        stack.kv_copies, stack.num_copies = (None, 0) if copies is None else (copies.data_ptr(), copies.shape[1])

    def _set_inputs(self, inputs_LTU: torch.Tensor | None) -> None:
        assert (inputs_LTU is None) == (not self._stack.input_size)
        assert inputs_LTU is None or (inputs_LTU.is_contiguous() and inputs_LTU.dtype == self._memory.dtype)
        self._stack.inputs = None if inputs_LTU is None else inputs_LTU.data_ptr()

    def _layer(self, layer: LayerWeights, mixer: ctypes.Structure) -> _Layer:
        norms = {
            "input_norm": layer.input_norm, "mlp_norm": layer.mlp_norm,
            "mixer_out_norm": layer.mixer_out_norm, "mlp_out_norm": layer.mlp_out_norm,
            "input_bias": layer.input_bias, "mlp_bias": layer.mlp_bias,
        }  # fmt: skip
        memory = self._memory
        matrices = {"o": memory.matrix(layer.o)}
        if layer.inputs is not None:
            norms["input_out_norm"] = layer.inputs.out_norm
            matrices |= {"input_gate": memory.matrix(layer.inputs.gate), "input_out": memory.matrix(layer.inputs.out)}
        if layer.gate_up is not None and layer.down is not None:
            gate_up = _padded_halves(layer.gate_up, layer.intermediate_size)
            matrices |= {"gate_up": memory.matrix(gate_up), "down": memory.matrix(layer.down)}
        return _Layer(
            mixer=ctypes.addressof(mixer), mixer_kind=layer.mixer.kind, **matrices,
            intermediate_size=layer.intermediate_size, scale=layer.scale,
            above=layer.xielu[0], below=layer.xielu[1],
            **{name: None if norm is None else memory.keep(norm) for name, norm in norms.items()},
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


def _rotary_of(mixer: AttentionWeights | StateWeights) -> int:
    return mixer.rotary if isinstance(mixer, AttentionWeights) and mixer.rotary is not None else -1
