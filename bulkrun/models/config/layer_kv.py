"""What each layer of a model keeps of a token in the KV cache, where layers differ in it. Torch-free.

Knows the keys by which config.json says so: transformers' `per_layer_config`, and those of published files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from bulkrun.errors import ModelError

_FULL, _SLIDING = "full_attention", "sliding_attention"
_TWO_ATTENTIONS = "LongcatFlashForCausalLM"  # in each of its layers
_TWICE_IN_WINDOWS = "MiMoV2FlashForCausalLM"  # keys of windowed layers have twice the heads
_GLOBAL_HEAD_DIM = 512  # of Gemma 4's layers of full attention where the file does not say


class LayerKV(NamedTuple):
    """A token's keys in one layer of attention; values lie beside them in the same shape, or within them."""

    num_heads: int
    head_dim: int
    source: int  # the layer whose keys and values are read: itself, or an earlier one that it shares them with
    latent_dim: int | None = None  # values are so many of the last dimensions of their keys; None: they lie beside them

    @property
    def size(self) -> int:
        """Numbers of a token's keys."""
        return self.num_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Dimensions of a value head."""
        return self.latent_dim or self.head_dim

    @property
    def cached_size(self) -> int:
        """Numbers that the cache holds of a token."""
        return self.size if self.latent_dim else 2 * self.size


def layers_kv(raw: Mapping[str, Any], num_layers: int, num_heads: int, head_dim: int) -> tuple[LayerKV, ...] | None:
    """Each layer's, of a parsed config.json of the general path; None where all are alike and none is shared.

    `num_heads`, `head_dim`: of layers of which the file says nothing else. Raises ModelError for a file that
    contradicts itself.
    """
    num_layers *= 2 if raw["architectures"][0] == _TWO_ATTENTIONS else 1
    kinds = list(raw.get("layer_types") or ())[:num_layers]
    others = _other_shapes(raw, kinds, num_heads)
    found = []
    for layer in range(num_layers):
        source = _source(layer, num_layers - (raw.get("num_kv_shared_layers") or 0), kinds)
        own = others.get(source, {})
        found.append(LayerKV(own.get("num_key_value_heads", num_heads), own.get("head_dim", head_dim), source))
    alike = [LayerKV(num_heads, head_dim, layer) for layer in range(num_layers)]
    return None if found == alike and raw["architectures"][0] != _TWO_ATTENTIONS else tuple(found)


def _other_shapes(raw: Mapping[str, Any], kinds: list[str], num_heads: int) -> dict[int, Mapping[str, int]]:
    """By layer, the keys that it has in place of the file's."""
    if raw.get("per_layer_config") is not None:  # empty where all layers are alike
        return {int(layer): keys for layer, keys in raw["per_layer_config"].items()}
    if raw["architectures"][0] == _TWICE_IN_WINDOWS:
        twice = {"num_key_value_heads": 2 * num_heads}
        return {layer: twice for layer, kind in enumerate(kinds) if kind == _SLIDING}
    if not raw["architectures"][0].startswith("Gemma4"):
        return {}
    full = {"head_dim": raw.get("global_head_dim") or _GLOBAL_HEAD_DIM}
    if raw.get("attention_k_eq_v") and raw.get("num_global_key_value_heads"):
        full["num_key_value_heads"] = raw["num_global_key_value_heads"]
    return {layer: full for layer, kind in enumerate(kinds) if kind == _FULL}


def _source(layer: int, first_shared: int, kinds: list[str]) -> int:
    """The layer whose keys and values this one reads: where it shares them, the last one before of its kind."""
    if layer < first_shared:
        return layer
    same = [other for other, kind in enumerate(kinds[:first_shared]) if kind == kinds[layer]] if kinds else []
    if not same:
        raise ModelError(f"layer {layer} is to share the keys of an earlier one of its kind, and there is none")
    return same[-1]
