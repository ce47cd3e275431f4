"""Tensor names of per-layer embeddings, and where each goes; of layers that share keys, what their files have too."""

from __future__ import annotations

import re
from collections.abc import Iterator

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.decoder_layer import DecoderLayer
from bulkrun.models.decoder.layer_inputs import LayerInputEmbedding
from bulkrun.models.loading.target import Target, parts_of, whole

_KEYS_AND_VALUES = re.compile(r"^model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")


def embedding_targets(inputs: LayerInputEmbedding) -> Iterator[tuple[str, Target]]:
    """Those that all layers have in common."""
    yield "model.embed_tokens_per_layer.weight", whole(inputs.weight)
    width = inputs.weight.shape[1]
    yield from parts_of("model.", inputs.projection, {"per_layer_model_projection": width})
    yield "model.per_layer_projection_norm.weight", whole(inputs.norm.weight)


def layer_input_targets(prefix: str, layer: DecoderLayer, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    """Those of a layer, and the number behind it."""
    if layer.scale is not None:
        yield f"{prefix}layer_scalar", whole(layer.scale)
    if layer.input_mlp is None or layer.input_out is None or config.layer_inputs is None:
        return
    yield from parts_of(prefix, layer.input_mlp.gate_proj, {"per_layer_input_gate": config.layer_inputs.size})
    yield from parts_of(prefix, layer.input_mlp.out_proj, {"per_layer_projection": config.hidden_size})
    yield f"{prefix}post_per_layer_input_norm.weight", whole(layer.input_out.weight)


def is_of_shared_keys(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor would make keys or values of a layer that reads another one's: files have them all the same."""
    match = _KEYS_AND_VALUES.match(name)
    layer = -1 if match is None else int(match[1])
    return 0 <= layer < len(config.layers_kv) and config.layers_kv[layer].source != layer
