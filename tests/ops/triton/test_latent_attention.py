"""Paged attention whose values are the last dimensions of their keys, beside exact dense attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.triton import partial_results, shared_prefix
from tests.ops.triton.attention_cases import make_case, sinks_of
from tests.ops.triton.test_paged_attention import attend, check
from tests.ops.triton.test_shared_prefix import share

LATENT = [((6, 1, 24), 16), ((20, 1, 24), 20), ((71, 1, 24), 16), ((128, 1, 24), 16)]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one tile, so that a short context has several."""
    monkeypatch.setattr(partial_results, "CHUNK", 64)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, 0.7)])
@pytest.mark.parametrize(("heads", "value_dim"), LATENT, ids=str)
def test_decode_and_prompts(
    device: str, heads: tuple[int, int, int], value_dim: int, window: int | None, soft_cap: float | None
) -> None:
    """Decoded over several chunks and in one, and prompts, with sinks and without."""
    case = make_case([1, 1, 1, 20, 3], [140, 1, 64, 20, 70], heads, value_dim=value_dim, window=window, device=device)
    check(case, window, soft_cap)
    if soft_cap is not None:
        check(case, window, soft_cap, sinks_of(case))


@pytest.mark.parametrize("num_heads", [20, 128])
def test_their_real_size(device: str, num_heads: int) -> None:
    """Of 128 heads two programs take half each."""
    check(make_case([1, 3], [20, 9], (num_heads, 1, 576), value_dim=512, dtype=torch.float16, device=device))


@pytest.mark.parametrize(("heads", "value_dim"), [((6, 1, 24), 16), ((20, 1, 24), 16), ((6, 1, 40), 32)], ids=str)
def test_latents_of_fp8(device: str, heads: tuple[int, int, int], value_dim: int) -> None:
    case = make_case([1, 1, 20], [90, 40, 20], heads, value_dim=value_dim, dtype=torch.float16, device=device)
    stored = case.k_cache.to(FP8)
    eight_bits = dataclasses.replace(case, k_cache=stored, v_cache=stored[..., -value_dim:])
    rounded = stored.to(torch.float16)
    sixteen_bits = dataclasses.replace(case, k_cache=rounded, v_cache=rounded[..., -value_dim:])
    torch.testing.assert_close(attend(eight_bits), attend(sixteen_bits), atol=1e-3, rtol=1e-3)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("heads", "value_dim"), LATENT, ids=str)
def test_a_shared_prefix_of_latents(
    device: str, heads: tuple[int, int, int], value_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "_PLACES", 3)
    lens = [76 + i for i in range(9)]
    case = make_case([1] * 9, lens, heads, value_dim=value_dim, shared_blocks=17, dtype=torch.float16, device=device)
    check(share(case, ([8, 6, 5, 4, 3], 64), ([1, 2], 64)))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("num_heads", [20, 128])
def test_a_shared_prefix_of_latents_of_their_real_size(
    device: str, num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prefix, "_PLACES", 2)
    heads = (num_heads, 1, 576)
    case = make_case([1] * 3, [70, 75, 65], heads, value_dim=512, shared_blocks=16, dtype=torch.float16, device=device)
    check(share(case, ([2, 0], 64)))


@pytest.mark.gpu
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize(
    ("heads", "value_dim"), [((16, 1, 576), 512), ((20, 1, 576), 512), ((128, 1, 576), 512), ((40, 1, 320), 256)]
)
def test_large_bfloat16_steps(heads: tuple[int, int, int], value_dim: int, kv_dtype: torch.dtype) -> None:
    query_lens, context_lens = [1] * 6 + [700, 129, 5], [1, 2011, 523, 37, 512, 4000, 700, 463, 1328]
    case = make_case(
        query_lens, context_lens, heads, value_dim=value_dim, block_size=16, dtype=torch.bfloat16, device="cuda"
    )
    k_cache = case.k_cache.to(kv_dtype)
    check(dataclasses.replace(case, k_cache=k_cache, v_cache=k_cache[..., -value_dim:]))
