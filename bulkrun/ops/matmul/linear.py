"""Matrix products with weights; on a CPU, weights are laid out once for the processor's matrix units.

In panels of our own where there is AVX2, or AVX-512 for bf16 (`cpu.panel_linear`), else in bf16 as oneDNN likes them
best: it packs a plain weight anew on every call. Elsewhere float32 gains nothing from that and stays plain.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bulkrun.ops.cpu.panel_linear import can_pack_panels, pack_panels, pack_panels_, panel_linear

_PACK_ROWS = 32  # the row count the layout is chosen for; one layout serves all


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias`; x: [T, I]; weight: [O, I], plain, or from `pack_linear_weight`; returns [T, O]."""
    if weight.ndim == 4:
        return panel_linear(x, weight, bias)
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


def pack_linear_weight(
    weight: torch.Tensor, rows_dtype: torch.dtype | None = None, *, in_place: bool = False
) -> torch.Tensor:
    """The weight in the layout `linear` is fastest with: panels, oneDNN's, or the weight itself where there is none.

    rows_dtype: of what is multiplied with it, if not its own: then it is one that `can_pack_panels`. `in_place`: it may
    take the memory of the weight, which must not be used afterwards.
    """
    if not can_pack_panels(weight, rows_dtype):
        return pack_for_onednn(weight)
    return pack_panels_(weight) if in_place else pack_panels(weight)


def pack_for_onednn(weight: torch.Tensor) -> torch.Tensor:
    """The weight as oneDNN likes it best: an opaque tensor, or the weight itself where that gains nothing."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or is_packed(weight) or not can_pack_bfloat16():
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)


def is_packed(weight: torch.Tensor) -> bool:
    """Whether it comes from `pack_linear_weight` and no longer has the layout [O, I]."""
    return weight.is_mkldnn or weight.ndim == 4


def can_pack_bfloat16() -> bool:
    """Whether this torch and this processor multiply bf16 matrices natively from packed weights."""
    has_ops = hasattr(torch.ops.mkldnn, "_reorder_linear_weight") and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return has_ops and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
