"""Radians per position of each pair of head dimensions, for every rope variant of `RopeConfig`.

All in float32, as transformers computes them: at position 100,000 the last bit of a frequency can be seen.
"""

from __future__ import annotations

import math

import torch

from bulkrun.models.config.rope import RopeConfig


def rotary_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [R / 2] on the CPU, highest frequency first; R is the share of head_dim, or of its own, that turns.

    With proportional RoPE R is head_dim, and pairs beyond that share have the frequency 0.
    """
    head_dim = rope.head_dim or head_dim
    if rope.rope_type == "proportional":
        return _proportional(rope, head_dim)
    rotary_dim = int(head_dim * rope.partial_rotary_factor)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return plain / rope.factor
    if rope.rope_type == "llama3":
        return _blend(plain, rope.factor, _llama3_kept_share(plain, rope))
    if rope.rope_type == "yarn":
        return _blend(plain, rope.factor, _yarn_kept_share(rope, rotary_dim))
    if rope.rope_type == "longrope":
        return 1.0 / (torch.tensor(rope.short_factor, dtype=torch.float32, device="cpu") * rope.theta**exponents)
    return plain


def query_growth(tokens_T: torch.Tensor, beta: float, num_tokens: int) -> torch.Tensor:
    """What queries are multiplied by, float32 [T, 1, 1]: 1 where there are less than so many tokens, and then more.

    1 + beta * log(1 + n) where `num_tokens`, such as the original context, fit n times in those that there are,
    integers [T]: against attention that gets flatter the more keys there are. Ministral 3 counts the tokens before a
    query, Llama 4 the query too.
    """
    return (1.0 + beta * torch.log1p((tokens_T // num_tokens).float()))[:, None, None]


def _proportional(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / rope.theta**exponents / rope.factor
    frequencies[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
    return frequencies


def _blend(plain: torch.Tensor, factor: float, kept_share: torch.Tensor) -> torch.Tensor:
    """Between the frequency as it is (share 1) and stretched by the factor (share 0)."""
    return plain / factor * (1 - kept_share) + plain * kept_share


def _llama3_kept_share(plain: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """A ramp over the number of turns a dimension makes in the original context."""
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    return ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)


def _yarn_kept_share(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """A ramp over dimensions, from the one that turns beta_fast times to the one that turns beta_slow times."""
    low, high = (_dim_of_turns(turns, rope, head_dim) for turns in (rope.beta_fast, rope.beta_slow))
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001
    dims = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    return 1 - ((dims - low) / width).clamp(0, 1)


def _dim_of_turns(turns: float, rope: RopeConfig, head_dim: int) -> float:
    """The (fractional) pair of dimensions that turns so often over the original context."""
    ratio = rope.original_max_position_embeddings / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(rope.theta))
