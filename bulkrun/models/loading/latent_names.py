"""Tensor names of latent attention, and where each goes."""

from __future__ import annotations

from collections.abc import Iterator

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.latent_attention import LatentAttention
from bulkrun.models.loading.row_orders import last_halves_first
from bulkrun.models.loading.target import Target, parts_of, whole

_DOWN, _LATENTS = "q_a_proj", "kv_a_proj_with_mqa"


def latent_targets(prefix: str, attention: LatentAttention, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    """Those of one layer's attention."""
    latent, num_queries = attention.latent, attention.num_heads * attention.latent.query_dim
    orders = {}
    if config.turns_neighbours:
        queries = last_halves_first(attention.num_heads, latent.qk_nope_head_dim, latent.qk_rope_head_dim)
        keys = last_halves_first(1, latent.kv_lora_rank, latent.qk_rope_head_dim)
        orders = {"q_proj": queries, "q_b_proj": queries, _LATENTS: keys}
    first = {"q_proj": num_queries} if latent.q_lora_rank is None else {_DOWN: latent.q_lora_rank}
    yield from parts_of(prefix, attention.qkv_proj, {**first, _LATENTS: latent.key_dim}, orders)
    if attention.q_b_proj is not None and attention.q_norm is not None:
        yield f"{prefix}q_a_layernorm.weight", whole(attention.q_norm.weight)
        yield from parts_of(prefix, attention.q_b_proj, {"q_b_proj": num_queries}, orders)
    yield f"{prefix}kv_a_layernorm.weight", whole(attention.latent_norm.weight)
    yield f"{prefix}kv_b_proj.weight", whole(attention.heads.weight)
    yield from parts_of(prefix, attention.o_proj, {"o_proj": config.hidden_size})
