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
from transformers import AttentionInterface, PreTrainedModel

from bulkrun import ops
from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.decoder.decoder_layer import attend
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata

ATTENTION_NAME = "bulkrun_paged"


@dataclass(slots=True)
class _Step:
    """What a model's attention layers must know of the step that runs; all of them hold this one object."""

    max_positions: int
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
        self.step = _Step(config.max_position_embeddings)
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                module.bulkrun_step = self.step
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


def register_attention() -> None:
    """Make our attention known to transformers under ATTENTION_NAME."""
    AttentionInterface.register(ATTENTION_NAME, _paged_attention)


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention contract: query and key [1, H or K, T, D], value [1, K, T, V]; returns [1, T, H, V].

    Values of fewer dimensions than keys (latent attention) lie in the cache with zeros behind them. Raises ModelError
    for what the cache cannot hold or the op cannot do.
    """
    step, layer = getattr(module, "bulkrun_step", None), getattr(module, "layer_idx", None)
    if step is None or layer is None or layer >= len(step.kv_cache.k):
        raise ModelError(f"its attention layers do not say which of them they are (layer_idx: {layer})")
    k_cache, v_cache = step.kv_cache.k[layer], step.kv_cache.v[layer]
    q_THD, k_TKD, v_TKD = (states[0].transpose(0, 1) for states in (query, key, value))
    _refuse_what_is_missing(module, k_TKD, v_TKD, k_cache, sliding_window, others)
    step.layers.append(layer)
    num_missing = k_TKD.shape[-1] - value.shape[-1]
    v_TKD = functional.pad(v_TKD, (0, num_missing)) if num_missing else v_TKD
    ops.store_kv(k_TKD, v_TKD, k_cache, v_cache, step.meta.slot_mapping_T)
    out_THD = attend(
        q_THD.to(v_TKD.dtype).contiguous(),  # some models turn queries in float32
        k_cache,
        v_cache,
        step.meta,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        soft_cap=softcap,
    )
    return out_THD[None, ..., : value.shape[-1]].to(query.dtype), None


def _refuse_what_is_missing(
    module: nn.Module,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache: torch.Tensor,
    sliding_window: int | None,
    others: dict[str, Any],
) -> None:
    is_one_size = k_TKD.shape[:2] == v_TKD.shape[:2] and k_TKD.shape[2] >= v_TKD.shape[2]
    if not is_one_size or k_TKD.shape[1:] != k_cache.shape[2:]:
        raise ModelError(
            f"keys of {list(k_TKD.shape[1:])} and values of {list(v_TKD.shape[1:])} (heads, dimensions) in layer "
            f"{module.layer_idx}; one size for all, which config.json gives as {list(k_cache.shape[2:])}, is supported"
        )
    if False in (others.get("is_causal"), getattr(module, "is_causal", None)):
        raise ModelError("its attention looks at later tokens as well; decoders that generate text do not")
    inputs = [name for name, value in others.items() if isinstance(value, torch.Tensor) and name != "position_ids"]
    if inputs:
        raise ModelError(f"its attention wants {', '.join(inputs)} besides queries, keys and values")
    config = module.config
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    holds = window is not None and window < module.bulkrun_step.max_positions  # or no sequence is that long
    if holds and sliding_window is None and not _attends_to_all(config, module.layer_idx):
        raise ModelError(f"its attention does not say where its sliding window of {window} holds")


def _attends_to_all(config: Any, layer: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    return bool(kinds) and kinds[layer] in ("full_attention", "attention")


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
