"""Attention over packed texts, the reference and its twin in Triton, against each text's own in float64."""

from __future__ import annotations

import math

import pytest
import torch

from bulkrun.ops.attention.packed_attention import TextLens
from bulkrun.ops.attention.packed_attention import packed_attention as reference
from bulkrun.ops.triton.packed_attention import packed_attention

LENS = [1, 1, 2, 15, 16, 17, 63, 64, 65, 130]
HEADS = [
    (2, 2, 16),
    (5, 1, 24),
    (6, 2, 80),
    *(pytest.param(x, marks=pytest.mark.slow) for x in ((4, 2, 64), (12, 12, 64))),
]
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
ERRORS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
OPS = [pytest.param(reference, id="reference"), pytest.param(packed_attention, id="triton")]


def make_states(
    lens: list[int], heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as they come out of one product: a token's stand side by side."""
    num_heads, num_kv_heads, head_dim = heads
    joined = torch.randn(sum(lens), num_heads + 2 * num_kv_heads, head_dim).to(device, dtype)
    q, k, v = joined.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return q, k, v


def exact(
    states: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    lens: list[int],
    scale: float,
    window: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, H, D] in float64: text by text, softmax spelled out."""
    out = []
    for q, k, v in zip(*(x.double().cpu().split(lens) for x in states), strict=True):
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        behind = torch.arange(len(q)) - torch.arange(len(q))[:, None]
        if bias is not None:
            scores = scores + bias.double().cpu()[:, behind + bias.shape[1] // 2]
        if window is not None:
            scores = scores.masked_fill(behind.abs() >= window, -math.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
    return torch.cat(out)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_each_text_attends_to_the_whole_of_itself(
    op: object, heads: tuple[int, int, int], dtype: torch.dtype, device: str
) -> None:
    states = make_states(LENS, heads, dtype, device)
    scale, error = heads[2] ** -0.5, ERRORS[dtype]
    found = op(*states, TextLens.of(LENS, device), scale=scale)  # type: ignore[operator]
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.double().cpu(), exact(states, LENS, scale), atol=error, rtol=error)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("window", [1, 2, 17, 64, 65, 200])
def test_a_window_reaches_as_far_ahead_as_behind(op: object, window: int, device: str) -> None:
    states = make_states(LENS, (4, 2, 32), torch.float32, device)
    found = op(*states, TextLens.of(LENS, device), scale=0.3, sliding_window=window)  # type: ignore[operator]
    torch.testing.assert_close(found.double().cpu(), exact(states, LENS, 0.3, window), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("farthest", [129, 500])
@pytest.mark.parametrize("heads", [(4, 2, 32), (3, 1, 16)])
def test_scores_are_biased_by_distance(op: object, farthest: int, heads: tuple[int, int, int], device: str) -> None:
    states, bias = make_states(LENS, heads, torch.float32, device), torch.randn(heads[0], 2 * farthest + 1).to(device)
    found = op(*states, TextLens.of(LENS, device), scale=0.3, distance_bias=bias)  # type: ignore[operator]
    torch.testing.assert_close(found.double().cpu(), exact(states, LENS, 0.3, bias=bias), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("window", [None, 9])
def test_nothing_of_a_text_reaches_another(window: int | None, device: str) -> None:
    states = make_states(LENS, (4, 2, 32), torch.float32, device)
    before = packed_attention(*states, TextLens.of(LENS, device), scale=0.3, sliding_window=window)
    starts = TextLens.of(LENS).cu_seqlens.tolist()
    for poisoned in (3, 6, 9):
        others = torch.ones(sum(LENS), dtype=torch.bool)
        others[starts[poisoned] : starts[poisoned + 1]] = False
        spoilt = [x.clone() for x in states]
        for x in spoilt:
            x[~others] = math.nan
        found = packed_attention(*spoilt, TextLens.of(LENS, device), scale=0.3, sliding_window=window)
        assert torch.equal(found[others], before[others])


def test_texts_of_one_length_and_of_many(device: str) -> None:
    for lens in ([5] * 40, [300], [1] * 130, [200, 300]):
        states = make_states(lens, (1, 1, 16), torch.float32, device)
        found = packed_attention(*states, TextLens.of(lens, device), scale=0.5)
        torch.testing.assert_close(found.double().cpu(), exact(states, lens, 0.5), atol=3e-6, rtol=3e-6)


def test_states_that_lie_otherwise_are_copied(device: str) -> None:
    q, k, v = states = make_states([7, 9], (4, 2, 16), torch.float32, device)
    transposed = tuple(x.transpose(0, 1).contiguous().transpose(0, 1) for x in states)
    lens = TextLens.of([7, 9], device)
    expected = packed_attention(*states, lens, scale=0.5)
    assert torch.equal(packed_attention(*transposed, lens, scale=0.5), expected)
    for apart in ((q.contiguous(), k, v.contiguous()), (q, k.contiguous(), v)):  # tokens as far apart as they come
        assert torch.equal(packed_attention(*apart, lens, scale=0.5), expected)
