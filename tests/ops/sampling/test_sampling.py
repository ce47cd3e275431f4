"""Sampling: noise by chi-square at fixed seeds, filters beside transformers' logits processors."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bulkrun.ops.sampling import sampling


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square_z(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The chi-square statistic in standard deviations from its mean: under 4 with overwhelming probability."""
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    freedom = observed.numel() - 1
    return (statistic - freedom) / math.sqrt(2 * freedom)


def draws(logits_V: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    noise = sampling.gumbel_noise(seeds, positions, logits_V.numel())
    return sampling.sample(logits_V.expand(seeds.numel(), -1), torch.ones(seeds.numel()), noise)


@pytest.mark.parametrize(
    ("seeds", "positions"),
    [
        (torch.full((40_000,), 7), torch.arange(40_000)),
        (torch.arange(40_000), torch.zeros(40_000, dtype=torch.int64)),
        (torch.arange(40_000) << 40, torch.full((40_000,), 3)),
        (torch.arange(40_000) // 200, torch.arange(40_000) % 200),
    ],
    ids=["one seed, every position", "neighbour seeds", "seeds that differ in high bits", "a crowd"],
)
def test_draws_follow_the_softmax(seeds: torch.Tensor, positions: torch.Tensor) -> None:
    logits_V = random_logits(1, 41, seed=2, spread=1.0)[0]
    observed = draws(logits_V, seeds, positions).bincount(minlength=41)
    assert abs(chi_square_z(observed, logits_V.softmax(-1) * seeds.numel())) < 4


def test_consecutive_draws_of_one_sequence_are_independent() -> None:
    tokens = draws(torch.zeros(8), torch.full((60_000,), 123456789012), torch.arange(60_000))
    pairs = (tokens[:-1] * 8 + tokens[1:]).bincount(minlength=64)
    assert abs(chi_square_z(pairs, torch.full((64,), pairs.sum() / 64))) < 4


def test_equal_positions_of_neighbour_seeds_are_independent() -> None:
    seeds = torch.arange(60_000)
    position = torch.full_like(seeds, 5)
    pairs = (draws(torch.zeros(8), seeds, position) * 8 + draws(torch.zeros(8), seeds + 1, position)).bincount(
        minlength=64
    )
    assert abs(chi_square_z(pairs, torch.full((64,), pairs.sum() / 64))) < 4


def test_rare_tokens_of_a_large_vocabulary_are_drawn_in_proportion() -> None:
    """151,936 equally likely tokens: indices spread evenly over the vocabulary, ends included."""
    seeds = torch.arange(200)
    tokens = torch.cat([draws(torch.zeros(151_936), s, torch.zeros_like(s)) for s in seeds.split(50)])
    observed = (tokens * 20 // 151_936).bincount(minlength=20)
    assert abs(chi_square_z(observed, torch.full((20,), 10.0))) < 4
    assert tokens.unique().numel() > 195


def test_noise_is_standard_gumbel() -> None:
    noise = sampling.gumbel_noise(torch.arange(200), torch.arange(200) * 3, 5_000)
    uniform = (-(-noise.double()).exp()).exp()  # the Gumbel distribution function
    observed = (uniform * 100).long().clamp(0, 99).flatten().bincount(minlength=100)
    assert abs(chi_square_z(observed, torch.full((100,), 10_000.0))) < 4
    assert torch.isfinite(noise).all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.005)
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.005)


def test_noise_of_a_row_does_not_depend_on_the_batch() -> None:
    seeds = torch.randint(0, 2**63 - 1, (33,), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(33) * 17
    crowd = sampling.gumbel_noise(seeds, positions, 1_003)
    for row in (0, 13, 32):
        assert torch.equal(crowd[row], sampling.gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 1_003)[0])
    order = torch.randperm(33)
    assert torch.equal(crowd[order], sampling.gumbel_noise(seeds[order], positions[order], 1_003))


def test_noise_differs_between_seeds_and_positions() -> None:
    seeds = torch.tensor([1, 1, 2, -1, 2**62, 2**62 + 2**32])
    noise = sampling.gumbel_noise(seeds, torch.tensor([0, 1, 0, 0, 0, 0]), 64)
    assert noise.unique(dim=0).shape[0] == 6
    assert noise.corrcoef().fill_diagonal_(0).abs().max() < 0.5


def test_whole_sampling_of_a_row_does_not_depend_on_the_batch() -> None:
    logits, seeds, positions = random_logits(9, 503), torch.arange(9) * 31, torch.arange(9)
    temperature = torch.tensor([0.0, 0.7, 1.3] * 3)
    top_k, top_p, min_p = (
        torch.tensor([0, 20, 5] * 3),
        torch.tensor([1.0, 0.9, 0.5] * 3),
        torch.tensor([0.0, 0.1, 0.01] * 3),
    )

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = sampling.apply_min_p(sampling.apply_temperature(logits[rows], temperature[rows]), min_p[rows])
        kept = sampling.apply_top_k_top_p(scaled, top_k[rows], top_p[rows])
        return kept, sampling.sample(kept, temperature[rows], sampling.gumbel_noise(seeds[rows], positions[rows], 503))

    kept, tokens = run(torch.arange(9))
    for row in range(9):
        alone_kept, alone_token = run(torch.tensor([row]))
        assert torch.equal(alone_kept[0], kept[row])
        assert alone_token[0] == tokens[row]


def test_greedy_rows_are_the_exact_argmax_beside_random_rows() -> None:
    logits = random_logits(6, 97)
    temperature = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 0.5])
    noise = sampling.gumbel_noise(torch.arange(6), torch.zeros(6, dtype=torch.int64), 97)
    scaled = sampling.apply_temperature(logits, temperature)
    assert torch.equal(scaled[::2], logits[::2])
    greedy = logits.argmax(-1)
    assert torch.equal(sampling.sample(scaled, temperature, noise)[::2], greedy[::2])


def test_a_single_allowed_token_is_always_drawn() -> None:
    logits = torch.full((2_000, 17), -math.inf)
    logits[:, 11] = -50.0
    noise = sampling.gumbel_noise(torch.arange(2_000), torch.zeros(2_000, dtype=torch.int64), 17)
    assert (sampling.sample(logits, torch.ones(2_000), noise) == 11).all()


@pytest.mark.parametrize("top_k", [1, 2, 7, 20, 300])
def test_top_k_equals_transformers(top_k: int) -> None:
    logits = random_logits(5, 211)
    expected = TopKLogitsWarper(top_k)(None, logits)
    rows_k, rows_p = torch.full((5,), top_k), torch.ones(5)
    assert torch.equal(sampling.apply_top_k_top_p(logits, rows_k, rows_p), expected)
    assert torch.equal(sampling.apply_top_k_top_p(logits, rows_k, rows_p, max_top_k=top_k), expected)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999, 1.0])
def test_top_p_equals_transformers(top_p: float) -> None:
    logits = random_logits(5, 211)
    expected = TopPLogitsWarper(top_p)(None, logits) if top_p < 1 else logits
    assert torch.equal(sampling.apply_top_k_top_p(logits, torch.zeros(5).long(), torch.full((5,), top_p)), expected)


@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_min_p_equals_transformers(min_p: float) -> None:
    logits = random_logits(5, 211)
    expected = MinPLogitsWarper(min_p)(None, logits)
    assert torch.equal(sampling.apply_min_p(logits, torch.full((5,), min_p)), expected)


@pytest.mark.parametrize("bounded", [False, True])
def test_all_filters_together_equal_transformers_in_vllms_order(bounded: bool) -> None:
    logits = random_logits(4, 1_009)
    expected = logits
    for warper in (TemperatureLogitsWarper(0.8), MinPLogitsWarper(0.01), TopKLogitsWarper(40), TopPLogitsWarper(0.85)):
        expected = warper(None, expected)
    scaled = sampling.apply_min_p(sampling.apply_temperature(logits, torch.full((4,), 0.8)), torch.full((4,), 0.01))
    ours = sampling.apply_top_k_top_p(
        scaled, torch.full((4,), 40), torch.full((4,), 0.85), max_top_k=64 if bounded else None
    )  # fmt: skip
    assert torch.equal(ours, expected)


def test_how_many_tokens_were_sorted_never_shows() -> None:
    """The bound comes from the whole batch, so a row must not see it, not even in a last bit."""
    logits = random_logits(64, 2_003)
    top_k, top_p = torch.arange(1, 65), torch.linspace(0.1, 1.0, 64)
    kept = sampling.apply_top_k_top_p(logits, top_k, top_p)
    for max_top_k in (64, 65, 100, 1_000):
        assert torch.equal(sampling.apply_top_k_top_p(logits, top_k, top_p, max_top_k=max_top_k), kept)


def test_each_row_has_its_own_filters() -> None:
    logits = random_logits(4, 101)
    top_k, top_p = torch.tensor([0, 3, -1, 10]), torch.tensor([1.0, 1.0, 0.4, 0.6])
    kept = sampling.apply_top_k_top_p(logits, top_k, top_p)
    assert torch.equal(kept[0], logits[0])
    assert torch.isfinite(kept[1]).sum() == 3
    assert torch.equal(kept[2:3], TopPLogitsWarper(0.4)(None, logits[2:3]))
    assert torch.equal(kept[3:4], TopPLogitsWarper(0.6)(None, TopKLogitsWarper(10)(None, logits[3:4])))


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    for max_top_k in (None, 2):
        kept = sampling.apply_top_k_top_p(logits, torch.tensor([2]), torch.ones(1), max_top_k=max_top_k)
        assert torch.isfinite(kept).tolist() == [[True, True, True, True, False]]
