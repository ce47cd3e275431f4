"""The general path: any decoder of transformers, its attention exchanged for ours over the paged cache.

transformers lets a model's attention be replaced by a registered function. Ours stores this step's keys and values and
attends over the cache; everything else is the model's own code, run over a step's tokens as one row. Each model is
compared with its own attention when it is loaded (`general_check`). Knows no architecture, no files.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from bulkrun import ops
from bulkrun.errors import ModelError
from bulkrun.models.config.layer_kv import LayerKV
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.general.attention_interface import STEP, Asked, register_attention
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata

ATTENTION_NAME = "bulkrun_paged"


@dataclass(slots=True)
class _Step:
    """What a model's attention layers must know of the step that runs; all of them hold this one object."""

    max_positions: int
    layers_kv: tuple[LayerKV, ...]
    kv_cache: KVCache | None = None
    meta: AttentionMetadata | None = None
    layers: list[int] = field(default_factory=list)  # that have attended in this step, in order


class GeneralModel:
    """A transformers model behind the engine's interface (`LanguageModel`)."""

    def __init__(self, model: PreTrainedModel, config: ModelConfig) -> None:
        self.config = config
        self.model = model
        self.dtype, self.device = model.dtype, model.device
        self.is_capturable = self.is_in_fp8 = False  # the architecture's own code may wait for the device
        self.step = _Step(config.max_position_embeddings, config.layers_kv)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, STEP, self.step)
        self._head = _head_of(model)

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: KVCache,
        meta: AttentionMetadata,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm, or [S, E] of some; writes the keys and values to the cache.

        input_ids_T, positions_T: integers [T], the tokens of all sequences in `meta`'s order.
        """
        self.step.kv_cache, self.step.meta = kv_cache, meta
        self.step.layers.clear()
        body = self.model.base_model
        try:
            output = body(input_ids=input_ids_T[None].long(), position_ids=positions_T[None].long(), use_cache=False)
        finally:
            self.step.kv_cache = self.step.meta = None  # or a pool that is replaced by a smaller one would stay alive
        hidden_TE: torch.Tensor = output.last_hidden_state[0]
        return hidden_TE if logits_indices is None else hidden_TE[logits_indices]

    def compute_logits(self, hidden_SE: torch.Tensor, *, as_computed: bool = False) -> torch.Tensor:
        """Logits float32 [S, V] of the rows that sample, by the model's own head; `as_computed`: in its dtype."""
        logits_SV: torch.Tensor = self._head(inputs_embeds=hidden_SE[None], use_cache=False).logits[0]
        return logits_SV if as_computed else logits_SV.float()


def register_paged_attention() -> None:
    """Make our attention known to transformers under ATTENTION_NAME."""
    register_attention(ATTENTION_NAME, _paged_attention)


def _paged_attention(module: nn.Module, asked: Asked) -> torch.Tensor:
    """Store this step's keys and values, unless an earlier layer that shares them did, and attend over the cache.

    Values of fewer dimensions than keys (latent attention) lie in the cache with zeros behind them. Raises ModelError
    for what the cache cannot hold or the op cannot do.
    """
    step, layer = getattr(module, STEP, None), getattr(module, "layer_idx", None)
    if step is None or layer is None or layer >= len(step.kv_cache.k):
        raise ModelError(f"its attention layers do not say which of them they are (layer_idx: {layer})")
    k_cache, v_cache = step.kv_cache.k[layer], step.kv_cache.v[layer]
    _refuse_what_is_missing(module, asked, k_cache)
    step.layers.append(layer)
    num_dims = asked.v_TKV.shape[-1]
    num_missing = asked.k_TKD.shape[-1] - num_dims
    v_TKD = functional.pad(asked.v_TKV, (0, num_missing)) if num_missing else asked.v_TKV
    if step.layers_kv[layer].source == layer:
        ops.store_kv(asked.k_TKD, v_TKD, k_cache, v_cache, step.meta.slot_mapping_T)
        if step.meta.kv_copies is not None:
            ops.copy_kv(k_cache, v_cache, step.meta.kv_copies)
    out_THD = ops.paged_attention(
        asked.q_THD.to(v_TKD.dtype).contiguous(),  # some models turn queries in float32
        k_cache,
        v_cache,
        step.meta,
        scale=asked.scale,
        sliding_window=asked.sliding_window,
        soft_cap=asked.soft_cap,
        sinks_H=None if asked.sinks_H is None else asked.sinks_H.float(),
    )
    return out_THD[..., :num_dims].to(asked.q_THD.dtype)


def _refuse_what_is_missing(module: Any, asked: Asked, k_cache: torch.Tensor) -> None:
    keys, values = asked.k_TKD.shape, asked.v_TKV.shape
    if keys[:2] != values[:2] or keys[2] < values[2] or keys[1:] != k_cache.shape[2:]:
        raise ModelError(
            f"keys of {list(keys[1:])} and values of {list(values[1:])} (heads, dimensions) in layer "
            f"{module.layer_idx}; those of {list(k_cache.shape[2:])}, as config.json is read, are supported"
        )
    if False in (asked.others.get("is_causal"), getattr(module, "is_causal", None)):
        raise ModelError("its attention looks at later tokens as well; decoders that generate text do not")
    if asked.has_mask:
        raise ModelError("its attention wants a mask of its own making")
    asked.refuse_more()
    config = module.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    holds = window is not None and window < getattr(module, STEP).max_positions  # or no sequence is that long
    if holds and asked.sliding_window is None and not _attends_to_all(config, module.layer_idx):
        raise ModelError(f"its attention does not say where its sliding window of {window} holds")


def _attends_to_all(config: Any, layer: int) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return layer < len(kinds) and kinds[layer] in ("full_attention", "attention")


def _head_of(model: PreTrainedModel) -> PreTrainedModel:
    """The model with nothing below its head: its code turns hidden states into logits, scales and caps included."""
    head = copy.copy(model)
    head._modules = dict(model._modules) | {model.base_model_prefix: _NoBody()}
    return head


class _NoBody(nn.Module):
    """Stands where the layers were: what goes in comes out."""

    @property
    def decoder(self) -> _NoBody:
        """Some architectures (OPT) call their body by this name."""
        return self

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _HiddenStates:
        """The embeddings, as the last hidden states."""
        return _HiddenStates(inputs_embeds)


class _HiddenStates:
    """A body's output that has only the last hidden states."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None
