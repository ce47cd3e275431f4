"""The order in which a checkpoint has the rows of some projections, seen from ours: of each of our rows its index."""

from __future__ import annotations

import torch

from bulkrun.models.config.delta_net import DeltaNetConfig
from bulkrun.models.config.model_config import DecoderConfig

BY_KEY_HEAD = ("Qwen3NextForCausalLM",)  # a delta net's projections: of one key head everything, then of the next

# of attention: q, k and v in one tensor, one behind the other or of each key head its queries, its key and its value
FUSED_QKV = ("Phi3ForCausalLM",)
QKV_BY_KEY_HEAD = ("FalconForCausalLM", "GPTNeoXForCausalLM")
QKV_BY_SHARD = ("CodeGenForCausalLM",)  # or, of each fourth of the heads, q, then v, then k
GATES_APART = ("AfmoeForCausalLM",)  # of attention: a projection of their own, and not with each head's query

_NUM_SHARDS = 4  # that CodeGen was trained in


def reordered_projections(config: DecoderConfig) -> set[str]:
    """The projections of a layer whose rows are in another order here than in a checkpoint, by their names."""
    has_gates_within = config.gates_attention and config.architecture not in GATES_APART
    is_regrouped = config.architecture in QKV_BY_KEY_HEAD and config.num_kv_heads > 1
    are_reordered = has_gates_within or config.turns_neighbours or config.turns_backwards or is_regrouped
    reordered = {"attention.qkv_proj"} if are_reordered else set()
    if config.latent is not None and config.turns_neighbours:
        reordered |= {"attention.q_b_proj"}
    return reordered | ({"attention.qkvz_proj"} if config.architecture in BY_KEY_HEAD else set())


def gates_first(config: DecoderConfig) -> torch.Tensor:
    """Of queries that are stored with their gates, each head's query before its gate: all gates, then all queries."""
    row_H2D = torch.arange(2 * config.num_heads * config.head_dim).view(config.num_heads, 2, config.head_dim)
    return row_H2D.flip(1).transpose(0, 1).flatten()


def halves_first(config: DecoderConfig, num_heads: int) -> torch.Tensor:
    """Of heads whose neighbouring dimensions turn together: of each head all that come first in their pairs, then all
    that come second, then those that do not turn."""
    turns = (int(config.head_dim * rope.partial_rotary_factor) for rope in config.ropes if rope is not None)
    turning = max(turns, default=0)
    of_head = torch.arange(config.head_dim)
    of_head = torch.cat((of_head[:turning:2], of_head[1:turning:2], of_head[turning:]))
    return (torch.arange(num_heads)[:, None] * config.head_dim + of_head).flatten()


def halves_swapped(config: DecoderConfig, num_heads: int) -> torch.Tensor:
    """Of heads that turn backwards: of each head its second half, then its first, which then turn forwards."""
    of_head = torch.arange(config.head_dim).roll(config.head_dim // 2)
    return (torch.arange(num_heads)[:, None] * config.head_dim + of_head).flatten()


def last_halves_first(num_heads: int, fixed: int, turning: int) -> torch.Tensor:
    """Of heads whose last dimensions alone turn, neighbours together: of those of each head all that come first in
    their pairs, then all that come second."""
    of_head = torch.arange(fixed + turning)
    of_head = torch.cat((of_head[:fixed], of_head[fixed::2], of_head[fixed + 1 :: 2]))
    return (torch.arange(num_heads)[:, None] * (fixed + turning) + of_head).flatten()


def qkv_order(config: DecoderConfig) -> torch.Tensor | None:
    """Of queries, keys and values that are stored as one: all queries, all keys, all values. None: so they are."""
    head_dim, share = config.head_dim, config.num_heads // config.num_kv_heads
    if config.architecture in QKV_BY_KEY_HEAD:
        return _regrouped(config.num_kv_heads, [share * head_dim, head_dim, head_dim])
    if config.architecture not in QKV_BY_SHARD:
        return None
    q_A, v_A, k_A = _regrouped(_NUM_SHARDS, [config.hidden_size // _NUM_SHARDS] * 3).chunk(3)
    halves = halves_first(config, config.num_heads)
    return torch.cat((q_A[halves], k_A[halves], v_A))


def qkvz_order(net: DeltaNetConfig) -> torch.Tensor:
    """Of queries, keys, values and gates that are stored by key head: all queries, all keys, all values, all gates."""
    share = net.value_dim // net.num_key_heads
    return _regrouped(net.num_key_heads, [net.key_head_dim, net.key_head_dim, share, share])


def ba_order(net: DeltaNetConfig) -> torch.Tensor:
    """Of b and a, stored so: all b, then all a."""
    share = net.num_value_heads // net.num_key_heads
    return _regrouped(net.num_key_heads, [share, share])


def _regrouped(num_groups: int, sizes: list[int]) -> torch.Tensor:
    """Rows that lie group by group, each with parts of these sizes, as the parts of all groups one after another."""
    row_GA = torch.arange(num_groups * sum(sizes)).view(num_groups, -1)
    return torch.cat([part_GA.flatten() for part_GA in row_GA.split(sizes, dim=1)])
