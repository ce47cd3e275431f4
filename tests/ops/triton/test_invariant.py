"""The batch-invariant kernels: right, and the same bits for a row or query in every batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bulkrun.ops.triton import prefill_attention
from bulkrun.ops.triton.invariant_attention import invariant_attention
from bulkrun.ops.triton.invariant_linear import invariant_linear
from bulkrun.windows import Chunks, Window
from tests.ops.prefix_groups import prefixes_of
from tests.ops.triton.attention_cases import Case, exact_attention, make_case, sinks_of
from tests.processor import needs_even_products

HALF = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
BIG = pytest.param((300, 4096, 14336), marks=pytest.mark.gpu)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(1, 64, 64), (70, 100, 131), (130, 72, 96), BIG])
def test_product_is_right(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_rows, size, num_outputs = shape
    x, weight, bias = torch.randn(num_rows, size), torch.randn(num_outputs, size) * size**-0.5, torch.randn(num_outputs)
    x, weight, bias = (tensor.to(device, dtype) for tensor in (x, weight, bias))
    exact = x.double() @ weight.double().T + bias.double()
    error = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": torch.finfo(dtype).eps}
    torch.testing.assert_close(invariant_linear(x, [weight], bias, None).double(), exact, **error)


@needs_even_products
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(150, 200, 131), BIG, pytest.param((600, 4096, 6144), marks=pytest.mark.gpu)])
def test_a_rows_product_has_the_same_bits_beside_any_others(
    device: str, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_rows, size, num_outputs = shape
    x, weight = torch.randn(num_rows, size).to(device, dtype), torch.randn(num_outputs, size).to(device, dtype)
    everything = invariant_linear(x, [weight], None, None)
    for count in (1, 2, 17, 63, 64, 65, 128, num_rows):
        assert torch.equal(invariant_linear(x[:count], [weight], None, None), everything[:count])
        assert torch.equal(invariant_linear(x[-count:], [weight], None, None), everything[-count:])
    order = torch.randperm(num_rows, device=device)
    assert torch.equal(invariant_linear(x[order], [weight], None, None), everything[order])


def test_product_of_no_rows_and_of_strided_ones(device: str) -> None:
    x, weight = torch.randn(6, 2, 32, device=device), torch.randn(16, 32, device=device)
    assert invariant_linear(x[:0, 0], [weight], None, None).shape == (0, 16)
    assert torch.equal(
        invariant_linear(x[:, 1], [weight], None, None), invariant_linear(x[:, 1].clone(), [weight], None, None)
    )


CASES = [
    ((6, 2, 8), None, None),
    ((4, 4, 16), None, 5.0),
    ((6, 2, 8), 13, None),
    ((6, 2, 8), Chunks(40), None),
    pytest.param((32, 8, 128), None, None, marks=pytest.mark.gpu),
    pytest.param((32, 8, 128), 1000, 30.0, marks=pytest.mark.gpu),
]


def _attend(case: Case, window: Window | None, soft_cap: float | None, **changes: object) -> torch.Tensor:
    meta = replace(case.meta, **changes)
    return invariant_attention(
        case.q_THD, case.k_cache, case.v_cache, meta, scale=0.3, sliding_window=window, soft_cap=soft_cap
    )


@pytest.mark.parametrize(("heads", "window", "soft_cap"), CASES)
def test_attention_is_right_for_decode_and_chunks(
    device: str, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    case = make_case([1, 1, 1, 70, 3], [90, 1, 64, 70, 100], heads, window=window, device=device)
    exact = exact_attention(case, 0.3, window, soft_cap)
    torch.testing.assert_close(_attend(case, window, soft_cap).double().cpu(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(("heads", "value_dim"), [((6, 1, 24), 16), ((71, 1, 24), 20)], ids=str)
def test_attention_of_values_within_keys_is_right(device: str, heads: tuple[int, int, int], value_dim: int) -> None:
    case = make_case([1, 1, 10, 3], [90, 1, 10, 40], heads, value_dim=value_dim, device=device)
    exact = exact_attention(case, 0.3, None, None)
    torch.testing.assert_close(_attend(case, None, None).double().cpu(), exact, atol=2e-5, rtol=2e-5)


@needs_even_products
@pytest.mark.parametrize(("heads", "window", "soft_cap"), CASES)
def test_a_query_has_the_same_bits_decoded_or_in_any_chunk(
    device: str, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    """One sequence of 150 tokens whole, then every query alone or at the end of chunks of other lengths."""
    dtype = torch.float16 if heads[2] < 128 else torch.bfloat16
    whole = make_case([150], [150], heads, device=device, dtype=dtype)
    expected = _attend(whole, window, soft_cap)
    for end in range(1, 151, 23):
        for length in {1, min(5, end), min(70, end)}:
            meta = replace(
                whole.meta,
                context_lens_S=torch.tensor([end], dtype=torch.int32, device=device),
                cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32, device=device),
                num_decode_seqs=int(length == 1),
                max_query_len=length,
                max_context_len=end,
            )
            part = invariant_attention(
                whole.q_THD[end - length : end], whole.k_cache, whole.v_cache, meta,
                scale=0.3, sliding_window=window, soft_cap=soft_cap,
            )  # fmt: skip
            assert torch.equal(part, expected[end - length : end]), (end, length)


@pytest.mark.parametrize(("heads", "window", "soft_cap"), CASES)
def test_attention_with_sinks_is_right(
    device: str, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    case = make_case([1, 1, 1, 70, 3], [90, 1, 64, 70, 100], heads, window=window, device=device)
    ours = invariant_attention(
        case.q_THD, case.k_cache, case.v_cache, case.meta,
        scale=0.3, sliding_window=window, soft_cap=soft_cap, sinks_H=sinks_of(case),
    )  # fmt: skip
    exact = exact_attention(case, 0.3, window, soft_cap, sinks_of(case))
    torch.testing.assert_close(ours.double().cpu(), exact, atol=2e-5, rtol=2e-5)


def test_every_tile_has_a_mask_and_decoded_tokens_are_prompts(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may round tiles without one otherwise; the interpreter does not."""
    launches: list[dict[str, object]] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda *args, **options: launches.append(options | {"first_seq, num_seqs": args[-2:]})

    monkeypatch.setattr(prefill_attention, "_prefill_kernel", Kernel())
    _attend(make_case([1, 1, 70], [9, 1, 90], (4, 2, 16), device=device), None, None)
    assert [(one["MASK_ALL"], one["first_seq, num_seqs"]) for one in launches] == [(True, (0, 3))]


def test_the_hint_of_a_shared_prefix_and_looser_bounds_change_no_bit(device: str) -> None:
    case = make_case([1, 1, 1], [130, 140, 90], (4, 2, 16), block_size=16, shared_blocks=4, device=device)
    plain = _attend(case, None, None)
    shared = prefixes_of([([0, 1, 2], 64)], 3, device)
    assert torch.equal(_attend(case, None, None, shared_prefixes=shared), plain)
    assert torch.equal(_attend(case, None, None, max_context_len=512, max_query_len=8), plain)
