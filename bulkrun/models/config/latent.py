"""Latent attention (DeepSeek-V2, arXiv 2405.04434): what a config.json says of it. Torch-free.

All heads' keys and values are made of one short vector of a token, its latent, and one more part of keys that all heads
share carries the position. Both are all that the cache keeps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import check_number


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """Sizes of latent attention, by the names of config.json."""

    kv_lora_rank: int  # dimensions of a latent
    q_lora_rank: int | None  # of what queries are made of; None: the hidden state itself
    qk_nope_head_dim: int  # of a head's query, and of its key, those that are made of a latent
    qk_rope_head_dim: int  # and those that RoPE turns, the same of all keys
    v_head_dim: int

    @property
    def key_dim(self) -> int:
        """Numbers of a token in the cache: what RoPE has turned, then the latent, of which values are made."""
        return self.qk_rope_head_dim + self.kv_lora_rank

    @property
    def query_dim(self) -> int:
        """Of a head, as queries are projected."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def projection_shapes(self, hidden_size: int, num_heads: int) -> list[tuple[int, int]]:
        """Outputs and inputs of a layer's projections, without the matrices of single heads."""
        rank, num_queries = self.q_lora_rank, num_heads * self.query_dim
        up = [] if rank is None else [(num_queries, rank)]
        return [((rank or num_queries) + self.key_dim, hidden_size), *up, (hidden_size, num_heads * self.v_head_dim)]

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Weights that one token is multiplied with in a layer."""
        of_heads = self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return of_heads + sum(rows * columns for rows, columns in self.projection_shapes(hidden_size, num_heads))


def latent_of(keys: Mapping[str, Any]) -> LatentConfig | None:
    """The latent attention that the keys of a config.json ask for, if any. Raises ModelError for what cannot be one."""
    if "kv_lora_rank" not in keys:
        return None
    sizes = {field.name: keys[field.name] for field in fields(LatentConfig)}
    for name, size in sizes.items():
        if name != "q_lora_rank" or size is not None:
            check_number(name, size, int)
    if keys["attention_bias"]:
        raise ModelError("attention_bias true is not supported with latent attention; false is")
    return LatentConfig(**sizes)
