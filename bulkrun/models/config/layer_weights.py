"""How many weights of a decoder's layer one token is multiplied with. Arithmetic; torch-free."""

from __future__ import annotations

from bulkrun.models.config.model_config import DecoderConfig


def layer_weights(config: DecoderConfig, layer: int) -> int:
    """Weights that one token is multiplied with; of a mixture of experts those it is sent to, and the router.

    What is done with a state is left out, and what tells how: a hundredth of it.
    """
    if config.mlp_alone is None:
        beside = 0 if config.altup is None else config.altup.layer_weights(config.hidden_size)
        return _attention_weights(config, layer) + _mlp_weights(config, layer) + beside
    return _mlp_weights(config, layer) if config.mlp_alone[layer] else _attention_weights(config, layer)


def _attention_weights(config: DecoderConfig, layer: int) -> int:
    hidden, kind = config.hidden_size, config.recurrence
    if config.latent is not None:
        return config.latent.num_weights(hidden, config.num_heads)
    num_weights = 0
    if kind is not None and kind.layers[layer]:
        num_weights = sum(rows * columns for rows, columns in kind.projection_shapes(hidden))
    if not config.attends[layer]:
        return num_weights
    index = sum(config.attends[:layer])
    kv = config.layers_kv[index]
    num_heads = config.num_heads * (3 if config.gates_attention else 2)  # queries and outputs, and the gates
    if kv.source == index:
        are_values = config.keys_are_values is not None and config.keys_are_values[layer]
        num_heads += kv.num_heads if are_values else 2 * kv.num_heads
    return num_weights + hidden * kv.head_dim * num_heads


def _mlp_weights(config: DecoderConfig, layer: int) -> int:
    hidden, moe = config.hidden_size, config.moe
    num_matrices = 3 if config.has_mlp_gates else 2
    if moe is None or not moe.sparse_layers[layer]:
        return num_matrices * hidden * config.mlp_size(layer)
    sizes = moe.intermediate_size * moe.num_experts_per_tok + (moe.shared_size or 0)
    sizes += config.mlp_size(layer) if moe.beside_mlp else 0
    return hidden * (num_matrices * sizes + moe.num_experts)
