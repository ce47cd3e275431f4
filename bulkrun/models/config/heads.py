"""How many heads a decoder's queries and keys have, of how many dimensions, and how they are normalized. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import Family, QKNorm
from bulkrun.models.config.layer_kv import LayerKV


def heads_of(keys: Mapping[str, Any]) -> tuple[int, int, int]:
    """Query heads, key heads, dimensions of a head."""
    num_heads = keys["num_attention_heads"]
    head_dim = keys["head_dim"] or keys["hidden_size"] // num_heads
    num_kv_heads = keys["num_key_value_heads"] or num_heads
    _check_heads(num_heads, num_kv_heads, head_dim)
    return num_heads, num_kv_heads, head_dim


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads or head_dim % 2:
        raise ModelError(
            f"{num_heads} query heads over {num_kv_heads} key heads of {head_dim} dimensions is not supported; "
            "query heads must be a multiple of key heads, and the dimension even"
        )


def unlike_layers_of(keys: Mapping[str, Any], num_heads: int) -> tuple[LayerKV, ...] | None:
    """Each layer's keys where they differ. Raises ModelError for some that queries do not share evenly."""
    for kv in keys.get("layers_kv") or ():
        _check_heads(num_heads, kv.num_heads, kv.head_dim)
    return None if keys.get("layers_kv") is None else tuple(keys["layers_kv"])


def qk_norm_of(keys: Mapping[str, Any], family: Family) -> QKNorm:
    """How queries and keys are normalized, which some files may ask for."""
    if not keys.get("use_qk_norm"):
        return keys.get("qk_norm") or family.qk_norm
    return "centered_head" if family.are_centered else "head"


def are_normed_behind_rope(qk_norm: QKNorm, family: Family) -> bool:
    """Whether heads are normalized once they have turned; all that have no weight for it are."""
    return qk_norm in ("turned_head", "plain_head") or (qk_norm == "head" and not family.norm_weights)
