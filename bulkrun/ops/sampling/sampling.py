"""From logits to tokens, all on the device: temperature, filters, stateless noise.

Order (vLLM's): token masks -> penalties -> temperature -> min_p -> top_k -> top_p -> draw. Every function works row by
row, so that a row's result never depends on the rows beside it. Logits are float32 [S, V]. Knows no request, no policy.
"""

from __future__ import annotations

import torch

_NEG_INF = float("-inf")
_TILE = 2**17  # elements hashed at once: the temporaries stay in a processor's cache (3x on a large vocabulary)


def gumbel_noise(seed_S: torch.Tensor, position_S: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Standard Gumbel noise as a pure function of (seed, position, vocabulary index); float32 [S, V].

    seed_S, position_S: int64. No state and no generator: the same sequence gets the same noise in any batch, after
    any resume. A 64-bit key per row and a 32-bit hash per element, turned into an exponential variate whose small
    values, the ones that win the draw, keep full float precision.
    """
    key_S = _mix64(_mix64(seed_S) ^ position_S)
    low_S1, high_S1 = _low32(key_S)[:, None], _low32(key_S >> 32)[:, None]
    index_V = torch.arange(vocab_size, dtype=torch.int32, device=seed_S.device)
    noise_SV = torch.empty(seed_S.numel(), vocab_size, device=seed_S.device)
    width = max(_TILE // max(seed_S.numel(), 1), 1)
    for index_C, out_SC in zip(index_V.split(width), noise_SV.split(width, dim=1), strict=True):
        out_SC.copy_(_hashed_gumbel(index_C, low_S1, high_S1))
    return noise_SV


def apply_temperature(logits_SV: torch.Tensor, temperature_S: torch.Tensor) -> torch.Tensor:
    """Logits divided by temperature; greedy rows (temperature 0) stay exactly as they are."""
    return logits_SV / torch.where(temperature_S == 0, 1.0, temperature_S)[:, None]


def apply_min_p(logits_SV: torch.Tensor, min_p_S: torch.Tensor) -> torch.Tensor:
    """Drop (-inf) tokens less likely than `min_p` times the likeliest; 0 keeps all. Logits are scaled already."""
    lowest_S1 = logits_SV.amax(-1, keepdim=True) + min_p_S.log()[:, None]
    return logits_SV.masked_fill(logits_SV < lowest_S1, _NEG_INF)


def apply_top_k_top_p(
    logits_SV: torch.Tensor, top_k_S: torch.Tensor, top_p_S: torch.Tensor, *, max_top_k: int | None = None
) -> torch.Tensor:
    """Keep the k likeliest tokens, then of those the fewest whose probabilities reach p; drop (-inf) the others.

    top_k_S: int64, 0 or below: all. top_p_S: float32, 1: all. Tokens that tie with the last one kept stay too, so
    the result does not depend on a sort order. `max_top_k` is the host's bound where every row has a top_k: then
    only so many tokens are sorted instead of the vocabulary.
    """
    if max_top_k is not None and max_top_k < logits_SV.shape[-1]:
        sorted_SC = logits_SV.topk(max_top_k, dim=-1).values
    else:
        sorted_SC = logits_SV.sort(dim=-1, descending=True).values
    num_sorted = sorted_SC.shape[-1]
    top_k_S1 = torch.where(top_k_S <= 0, num_sorted, top_k_S).clamp_max(num_sorted)[:, None]
    beyond_k_SC = torch.arange(num_sorted, device=logits_SV.device) >= top_k_S1
    weight_SC = (sorted_SC - sorted_SC[:, :1]).exp()
    mass_SC = weight_SC.cumsum(-1)  # in order, so that a row's sums do not depend on how many tokens were sorted
    nucleus_S1 = mass_SC.gather(1, top_k_S1 - 1) * top_p_S[:, None]
    beyond_p_SC = (mass_SC - weight_SC >= nucleus_S1) & (top_p_S[:, None] < 1.0)
    num_kept_S1 = (~(beyond_k_SC | beyond_p_SC)).sum(-1, keepdim=True).clamp_min_(1)
    return logits_SV.masked_fill(logits_SV < sorted_SC.gather(1, num_kept_S1 - 1), _NEG_INF)


def sample(logits_SV: torch.Tensor, temperature_S: torch.Tensor, noise_SV: torch.Tensor) -> torch.Tensor:
    """The chosen token of each row, int64 [S]: argmax(logits + Gumbel noise) draws from softmax(logits).

    logits_SV: penalized, scaled and filtered. Rows of temperature 0 take the plain argmax, without noise.
    """
    is_random_S1 = (temperature_S != 0).to(logits_SV.dtype)[:, None]
    return torch.addcmul(logits_SV, noise_SV, is_random_S1).argmax(-1)


def _mix64(x: torch.Tensor) -> torch.Tensor:
    """The splitmix64 finalizer: every input bit reaches every output bit. int64 arithmetic wraps."""
    x = x + -0x61C8864680B583EB
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def _hashed_gumbel(index_C: torch.Tensor, low_S1: torch.Tensor, high_S1: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [S, C] of the given vocabulary indices under each row's key halves."""
    bits = _xor_shift((index_C * -0x61C88647) ^ low_S1, 16).mul_(-0x7A143595)
    bits = _xor_shift(bits.add_(high_S1), 13).mul_(-0x3D4D51CB)
    bits = _xor_shift(bits, 16).bitwise_and_(0x7FFFFFFF)
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_max_(1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _low32(x: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64, as int32 of the same bits."""
    return (((x & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000).to(torch.int32)


def _xor_shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """`x ^= x >>> bits`, in place (the shift of a signed integer repeats the sign: it is masked off)."""
    return x.bitwise_xor_((x >> bits).bitwise_and_((1 << (32 - bits)) - 1))
