"""A loaded decoder made batch-invariant: a token's bits depend on its sequence, whatever else is computed beside it.

The products with weights and attention are exchanged for ops that keep that promise (`ops.invariant_linear`,
`ops.invariant_attention`); norms, gates, rotary embedding and products with weights of 8 or 4 bits work row by row as
they are. On a CPU the model is wrapped besides. Where all its layers are one call over panels (`cpu.layer_stack`), that
keeps the promise as it is. Elsewhere steps are padded to whole tiles, and the threads share tiles instead of sums.
Knows no engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun import ops
from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.attention import Attention
from bulkrun.models.decoder.compiled_layers import compile_layers
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.latent_attention import LatentAttention, LatentHeads
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.decoder.quantized_layers import FourBitLinear, Int8ExpertLinear, Int8Linear
from bulkrun.models.decoder.sparse_mlp import SparseMLP
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata
from bulkrun.ops.cpu.dtypes import cache_format
from bulkrun.ops.cpu.layer_stack import LayerStack
from bulkrun.ops.cpu.panel_linear import can_pack_panels
from bulkrun.ops.matmul.invariant_linear import TILE_ROWS
from bulkrun.ops.tile_workers import TileWorkers


class InvariantLinear(nn.Module):
    """In the place of a `Linear`, with its weight in panels."""

    def __init__(self, linear: Linear, workers: TileWorkers | None) -> None:
        super().__init__()
        self.panels, self.bias, self.workers = ops.make_panels(linear.weight.data), linear.bias, workers

    @property
    def takes_any_rows(self) -> bool:
        """Whether it is a product of our own, which needs no whole tiles."""
        return self.panels[0].ndim == 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, I] -> [T, O]."""
        return ops.invariant_linear(x, self.panels, self.bias, self.workers)


class InvariantLatentHeads(nn.Module):
    """In the place of `LatentHeads`: one product for each head and either matrix."""

    def __init__(self, heads: LatentHeads, workers: TileWorkers | None) -> None:
        super().__init__()
        of_keys_HNR, of_values_HVR = heads.matrices
        self._of_latents = [ops.make_panels(matrix.contiguous()) for matrix in of_keys_HNR.transpose(1, 2)]
        self._of_values, self.workers = [ops.make_panels(matrix.contiguous()) for matrix in of_values_HVR], workers

    @property
    def panels(self) -> list[torch.Tensor]:
        """Of all products."""
        return [panel for panels in (*self._of_latents, *self._of_values) for panel in panels]

    def queries_of_latents(self, q_THN: torch.Tensor) -> torch.Tensor:
        """Queries of keys [T, H, N] -> of latents [T, H, R]."""
        return self._by_head(q_THN, self._of_latents)

    def values(self, latent_THR: torch.Tensor) -> torch.Tensor:
        """What heads find, as latents [T, H, R] -> as values [T, H, V]."""
        return self._by_head(latent_THR, self._of_values)

    def _by_head(self, x_THI: torch.Tensor, panels_H: list[list[torch.Tensor]]) -> torch.Tensor:
        rows_H = x_THI.transpose(0, 1).contiguous()
        products = (ops.invariant_linear(*one, None, self.workers) for one in zip(rows_H, panels_H, strict=True))
        return torch.stack([*products], dim=1)


class ExpertByExpert:
    """In the place of `ops.fused_experts`, on a CPU, where a mixture's experts are not one call of our own: each
    expert's tokens padded to whole tiles. It has the weights, so those that it is given do not count."""

    def __init__(self, sparse: SparseMLP, workers: TileWorkers) -> None:
        self.gate_up, self.down = (_products(of, workers) for of in (sparse.gate_up_proj, sparse.down_proj))
        self.activation = sparse.activation

    def __call__(
        self, x_TE: torch.Tensor, _gate_up: Any, _down: Any, weights_Tk: torch.Tensor, ids_Tk: torch.Tensor, *_: Any
    ) -> torch.Tensor:
        """[T, E] -> [T, E], biases and the activation included."""
        return ops.expert_by_expert(x_TE, weights_Tk, ids_Tk, self._expert)

    def _expert(self, expert: int, x_PE: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up[expert](_whole_tiles(x_PE))
        return self.down[expert](ops.gated(gate_up, self.activation))[: x_PE.shape[0]]


def _products(
    projection: ExpertLinear | Int8ExpertLinear, workers: TileWorkers
) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """The product with each expert's matrix, of whole tiles."""
    biases = [None] * len(projection.weight) if projection.bias is None else list(projection.bias)
    if isinstance(projection, Int8ExpertLinear):
        matrices = [ops.of_expert(projection.int8_weight, expert) for expert in range(len(biases))]
        return [partial(ops.int8_linear, weight=one, bias=bias) for one, bias in zip(matrices, biases, strict=True)]
    panels = [ops.make_panels(weight, in_place=True) for weight in projection.weight.data]
    return [
        partial(ops.invariant_linear, panels=one, bias=bias, workers=workers)
        for one, bias in zip(panels, biases, strict=True)
    ]


class InvariantModel:
    """A decoder of invariant layers on a CPU, behind the engine's interface (`LanguageModel`)."""

    def __init__(self, model: Decoder, workers: TileWorkers) -> None:
        self.model, self.workers = model, workers
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.is_capturable = self.is_in_fp8 = False  # on a CPU there are no graphs
        head = model.lm_head
        self._has_free_head = (
            isinstance(head, InvariantLinear) and head.takes_any_rows and not model.config.logits_soft_cap
        )

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: KVCache,
        meta: AttentionMetadata,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E], or [S, E]; tokens that fill the last tile, if need be, write to the null block."""
        hidden_TE: torch.Tensor
        if self.model.layer_stack is not None and cache_format(kv_cache.dtype, self.dtype) is not None:
            hidden_TE = self.model(input_ids_T, positions_T, kv_cache, meta, logits_indices)
            return hidden_TE
        meta = replace(meta, slot_mapping_T=_whole_tiles(meta.slot_mapping_T, -1))
        with self.workers.one_thread_each():
            hidden_TE = self.model(_whole_tiles(input_ids_T), _whole_tiles(positions_T), kv_cache, meta)
        return hidden_TE[: input_ids_T.shape[0]] if logits_indices is None else hidden_TE[logits_indices]

    def compute_logits(self, hidden_SE: torch.Tensor, *, as_computed: bool = False) -> torch.Tensor:
        """Logits float32 [S, V] of the rows that sample; `as_computed`: or in the head's dtype."""
        if self._has_free_head:
            return self.model.compute_logits(hidden_SE, as_computed=as_computed)
        with self.workers.one_thread_each():
            logits_SV = self.model.compute_logits(_whole_tiles(hidden_SE), as_computed=as_computed)
        return logits_SV[: hidden_SE.shape[0]]


def refuse_invariance(config: ModelConfig, device: torch.device, quantization: str | None) -> None:
    """Raise ModelError for a model, UsageError for a setting, that cannot be batch-invariant; both name the fix."""
    if quantization == "fp8":
        raise UsageError(
            f"engine.deterministic: the products of engine.quantization {quantization} depend on the batch; leave one "
            "of the two keys out (engine.kv_cache_dtype fp8 goes with deterministic)"
        )
    if not isinstance(config, DecoderConfig):
        raise ModelError(
            f"engine.deterministic: {config.architecture} runs through transformers' own code, whose sums depend on "
            "the batch; leave the key out, or take a model that `bulkrun models` calls fast"
        )
    if config.moe is not None and device.type != "cpu":
        raise ModelError(
            f"engine.deterministic: mixtures of experts ({config.architecture}) can do it on a CPU only; leave the key "
            "out, or set engine.device cpu"
        )


def make_invariant(model: Decoder) -> Decoder | InvariantModel:
    """Exchange the layers of a decoder whose weights are loaded; on a CPU, look whether it holds.

    Quantized weights are packed already, if they can be, and no others. Raises ModelError where this processor's
    products depend on a row's place.
    """
    workers = TileWorkers() if model.device.type == "cpu" else None
    if workers is not None:
        model.layer_stack = _stack_of_panels(model)
    for module in list(model.modules()):
        if isinstance(module, Attention | LatentAttention):
            module.paged_attention = partial(ops.invariant_attention, workers=workers)
        for name, child in list(module.named_children()):
            if isinstance(child, SparseMLP):
                child.fused_experts = _invariant_experts(child, workers)
            elif isinstance(child, Int8Linear | FourBitLinear) and workers is not None:
                child.multiply = partial(_with_all_threads, workers, child.multiply.__name__)
            elif isinstance(child, LatentHeads):
                setattr(module, name, InvariantLatentHeads(child, workers))
            elif isinstance(child, Linear):
                setattr(module, name, InvariantLinear(child, workers))
    if workers is None:
        return model
    with workers.one_thread_each(), torch.inference_mode():
        _check(model)
    return InvariantModel(model, workers)


def _stack_of_panels(model: Decoder) -> LayerStack | None:
    """All layers as one call, if it takes steps of every width: others would have other bits."""
    for module in model.modules():
        if isinstance(module, Linear) and can_pack_panels(module.weight, module.rows_dtype):
            module.pack()
    stack = compile_layers(model)
    return stack if stack is not None and stack.takes_any_width else None


def _invariant_experts(sparse: SparseMLP, workers: TileWorkers | None) -> Callable[..., torch.Tensor]:
    """As they are where they can be packed, but with all threads: a token's bits depend on that token alone."""
    assert workers is not None, "on a GPU mixtures are refused"
    sparse.gate_up_proj.pack()
    sparse.down_proj.pack()
    return partial(_with_all_threads, workers, "fused_experts") if sparse.is_packed else ExpertByExpert(sparse, workers)


def _with_all_threads(workers: TileWorkers, op: str, *args: Any) -> Any:
    with workers.all_together():
        return getattr(ops, op)(*args)  # looked up when it is called: `bench roofline` puts its own there


def _check(model: Decoder) -> None:
    layers = [module for module in model.modules() if isinstance(module, InvariantLinear | InvariantLatentHeads)]
    by_kind = {(panel.shape, panel.dtype): panel for layer in layers for panel in layer.panels}
    config = model.config
    kinds = {
        (config.num_heads, kv.num_heads, kv.head_dim, kv.value_dim, config.attention_soft_cap)
        for kv in config.layers_kv
    }
    if not (
        all(ops.is_invariant_linear(panel, _input_dtype(panel, model)) for panel in by_kind.values())
        and all(ops.is_invariant_attention(*kind, model.dtype) for kind in kinds)
    ):
        raise ModelError(
            f"engine.deterministic: on this processor, with this torch, products in {model.dtype} depend on a row's "
            "place in its batch; try another engine.dtype"
        )


def _input_dtype(panel: torch.Tensor, model: Decoder) -> torch.dtype:
    """float32 for routers that are, and of a float32 model whose weights are held in bfloat16."""
    return torch.promote_types(panel.dtype, model.dtype)


def _whole_tiles(rows: torch.Tensor, value: int = 0) -> torch.Tensor:
    """Rows [T, ...] and as many of `value` as fill the last tile: no op ever sees another number of rows."""
    missing = -rows.shape[0] % TILE_ROWS
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing), value=value) if missing else rows
