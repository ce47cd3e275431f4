"""Every layer of an encoder over a step's texts in one compiled call. Contract: `ops.encoder_layers`.

Keys and values go through a paged cache of one step, as decoders' do, for one layer at a time. A row's bits depend on
its own text alone, whatever else is in the step.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
import torch.nn.functional as F

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.cpu import panel_matrix, structs
from bulkrun.ops.cpu.dtypes import name
from bulkrun.ops.cpu.int8_linear import ROW_MULTIPLE
from bulkrun.ops.cpu.library import c_number, library
from bulkrun.ops.cpu.panel_linear import PANEL
from bulkrun.ops.cpu.stack_memory import LANES, Matrix, StackMemory, set_kept, set_step
from bulkrun.ops.encoder_layers import EncoderLayer, EncoderSizes

_ROWS = 16  # of a tile


class _EncoderLayer(ctypes.Structure):
    _fields_ = (
        *[(x, panel_matrix.Matrix) for x in ("qkv", "o", "up", "down")],
        *[(x, c_void_p) for x in ("attention_norm", "attention_norm_bias", "mlp_norm", "mlp_norm_bias")],
    )


_TOKEN_SCRATCH = ("q", "attended")
_SCRATCH = (*_TOKEN_SCRATCH, "qkv", "out", "up", "bytes", "row_scales")
_STEP = ("slots", "kept", "block_tables", "context_lens", "cu_seqlens_q")


class _EncoderStack(ctypes.Structure):
    """`struct EncoderStack` of encoder_stack.cpp."""

    _fields_ = (
        *[(x, c_void_p) for x in ("layers", "distance_bias", "x", "k_cache", "v_cache", *_SCRATCH, *_STEP)],
        *[(x, c_int64) for x in ("num_layers", "num_tokens", "num_seqs", "table_width", "num_kept")],
        *[(x, c_int64) for x in ("hidden_size", "intermediate_size", "num_heads", "head_dim", "block_size")],
        ("max_distance", c_int64),
        *[(x, c_float) for x in ("eps", "scale")],
        *[(x, c_int32) for x in ("is_gelu_tanh", "num_threads")],
    )


def can_stack_encoder(dtype: torch.dtype, hidden_size: int, intermediate_size: int, head_dim: int) -> bool:
    """Whether it is compiled for numbers of this dtype and such sizes; the first call may compile."""
    ops, end = library(), name(dtype)
    if ops is None or end is None or not hasattr(ops, f"encoder_stack_{end}"):
        return False
    return not (hidden_size % PANEL or intermediate_size % PANEL) and head_dim <= c_number("max_head_dim")


class EncoderStack:
    """The layers, their matrices in panels, of 8 bits too; not for two calls at a time."""

    def __init__(self, layers: Sequence[EncoderLayer[Matrix]], sizes: EncoderSizes, dtype: torch.dtype) -> None:
        width, inner = sizes.num_heads * sizes.head_dim, panel_matrix.num_columns(layers[0].up.weight)
        self._memory = memory = StackMemory(dtype, _row_sizes(width, inner, dtype), _TOKEN_SCRATCH)
        self._layers = (_EncoderLayer * len(layers))(*[self._layer(layer) for layer in layers])
        self._width, bias = width, sizes.distance_bias
        self._stack = _EncoderStack(
            layers=ctypes.addressof(self._layers), num_layers=len(layers), hidden_size=width, intermediate_size=inner,
            num_heads=sizes.num_heads, head_dim=sizes.head_dim, eps=sizes.eps, scale=sizes.head_dim**-0.5,
            is_gelu_tanh=sizes.activation == "gelu_tanh",
            distance_bias=None if bias is None else memory.keep(F.pad(bias.float(), (0, LANES - 1))),
            max_distance=0 if bias is None else bias.shape[1] // 2,
        )  # fmt: skip
        self._run: Callable[..., None] = structs.struct_function(
            f"encoder_stack_{name(dtype)}", _EncoderStack, _EncoderLayer, panel_matrix.Matrix
        )

    def room(self, num_tokens: int) -> torch.Tensor:
        """Where a step's embeddings are to be put: [T, E]; what comes out lies there too, until the next step."""
        rows = num_tokens + -num_tokens % _ROWS
        return torch.zeros(rows, self._width, dtype=self._memory.dtype)[:num_tokens]

    def __call__(
        self,
        x_TE: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        meta: AttentionMetadata,
        kept: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last layer, in the memory of their embeddings x_TE, which are from `room`.

        k_cache, v_cache: [N, B, H, D] contiguous, of the layers' dtype; blocks hold one text each. kept: int64 [S],
        ascending: only these tokens go on after the last layer's keys and values, and come out, [S, E].
        """
        assert x_TE.is_contiguous() and x_TE.dtype == k_cache.dtype == v_cache.dtype == self._memory.dtype
        stack = self._stack
        stack.x, stack.num_tokens = x_TE.data_ptr(), len(x_TE)
        stack.k_cache, stack.v_cache, stack.block_size = k_cache.data_ptr(), v_cache.data_ptr(), k_cache.shape[1]
        stack.num_threads = torch.get_num_threads()
        self._memory.make_room(stack, len(x_TE))
        set_step(stack, meta)
        set_kept(stack, kept, len(x_TE))
        self._run(ctypes.byref(stack))
        return x_TE if kept is None else x_TE[: len(kept)]

    def _layer(self, layer: EncoderLayer[Matrix]) -> _EncoderLayer:
        keep, matrix = self._memory.keep, self._memory.matrix
        attention, mlp = layer.attention_norm, layer.mlp_norm
        return _EncoderLayer(
            qkv=matrix(layer.qkv), o=matrix(layer.o), up=matrix(layer.up), down=matrix(layer.down),
            attention_norm=keep(attention.weight), attention_norm_bias=keep(attention.bias),
            mlp_norm=keep(mlp.weight), mlp_norm_bias=keep(mlp.bias),
        )  # fmt: skip


def _row_sizes(width: int, inner: int, dtype: torch.dtype) -> dict[str, int]:
    """Numbers in a row of each scratch buffer."""
    widest = max(width, inner)
    return {
        "q": width,
        "attended": width,
        "qkv": 3 * width,
        "out": width,
        "up": inner,
        "bytes": (widest + -widest % ROW_MULTIPLE) // dtype.itemsize,
        "row_scales": 4 // dtype.itemsize,
    }
