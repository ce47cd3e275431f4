"""transformers' attention interface: a function of ours under a name of ours, called for one row of tokens.

What transformers hands over is the same for every architecture whose attention can be exchanged. Knows no op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface

from bulkrun.errors import ModelError

STEP = "bulkrun_step"  # the attribute by which modules that attend know of the step that runs


class Asked(NamedTuple):
    """What a layer asks of attention; values may have fewer dimensions than keys."""

    q_THD: torch.Tensor
    k_TKD: torch.Tensor
    v_TKV: torch.Tensor
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    has_mask: bool
    sinks_H: torch.Tensor | None  # a score of each head beside those of the keys
    others: dict[str, Any]  # whatever else this architecture hands over

    def refuse_more(self) -> None:
        """Raise ModelError where further tensors, such as biases, take part."""
        more = [name for name, given in self.others.items() if isinstance(given, torch.Tensor)]
        if inputs := [name for name in more if name != "position_ids"]:
            raise ModelError(f"its attention wants {', '.join(inputs)} besides queries, keys and values")


def register_attention(name: str, attend: Callable[[nn.Module, Asked], torch.Tensor]) -> None:
    """Make `attend`, which returns [T, H, V], known to transformers; the module is the layer's that asks."""

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """query [1, H, T, D], key [1, K, T, D], value [1, K, T, V]; returns [1, T, H, V]."""
        q_THD, k_TKD, v_TKV = (given[0].transpose(0, 1) for given in (query, key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        asked = Asked(q_THD, k_TKD, v_TKV, scale, sliding_window, softcap, attention_mask is not None, s_aux, others)
        return attend(module, asked)[None], None

    AttentionInterface.register(name, attention)
