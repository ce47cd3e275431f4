"""The batch-invariant attention on a CPU: equal to exact attention, and a query's bits are its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops.attention.invariant_attention import invariant_attention as reference
from bulkrun.ops.attention.invariant_attention import is_invariant_attention
from bulkrun.ops.cpu.invariant_attention import invariant_attention as compiled
from bulkrun.ops.cpu.library import library
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.tile_workers import TileWorkers
from bulkrun.windows import Chunks, Window
from tests.ops.triton.attention_cases import Case, exact_attention, make_case, sinks_of

needs_library = pytest.mark.skipif(library() is None, reason="no compiler on this machine")
KINDS = [reference, pytest.param(compiled, marks=needs_library)]
CASES: list[tuple[tuple[int, int, int], Window | None, float | None]] = [
    ((6, 2, 8), None, None),
    ((4, 4, 16), None, 5.0),
    ((6, 2, 8), 13, None),
    ((40, 1, 16), 150, None),
]
CASES += [((6, 2, 8), Chunks(70), None), ((4, 4, 16), Chunks(128), 5.0)]
Attend = Callable[..., torch.Tensor]


def _attend(
    attend: Attend,
    case: Case,
    window: Window | None,
    soft_cap: float | None,
    threads: int = 1,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    workers = TileWorkers(threads)
    with workers.one_thread_each():
        return attend(
            case.q_THD, case.k_cache, case.v_cache, case.meta,
            scale=0.3, sliding_window=window, soft_cap=soft_cap, sinks_H=sinks_H, workers=workers,
        )  # fmt: skip


@pytest.mark.parametrize("attend", KINDS, ids=["reference", "compiled"])
@pytest.mark.parametrize(("heads", "window", "soft_cap"), CASES)
def test_equals_exact_attention(
    attend: Attend, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    case = make_case([1, 1, 1, 70, 3, 200], [300, 1, 128, 70, 257, 200], heads, window=window, device="cpu")
    exact = exact_attention(case, 0.3, window, soft_cap)
    torch.testing.assert_close(_attend(attend, case, window, soft_cap).double(), exact, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("attend", KINDS, ids=["reference", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "window", "soft_cap"), CASES)
@settings(max_examples=5)
@given(ends=st.lists(st.integers(1, 300), min_size=1, max_size=12, unique=True), threads=st.integers(1, 3))
def test_a_query_has_the_same_bits_decoded_or_in_any_chunk(
    attend: Attend,
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: Window | None,
    soft_cap: float | None,
    ends: list[int],
    threads: int,
) -> None:
    """One sequence of 300 tokens at once; then in chunks that end at `ends`, and the last query of each alone."""
    whole = make_case([300], [300], heads, device="cpu", dtype=dtype)
    expected = _attend(attend, whole, window, soft_cap)
    for start, end in zip([0, *sorted(ends)], sorted(ends), strict=False):
        for first in (start, end - 1):
            part = _attend(attend, _chunk(whole, first, end), window, soft_cap, threads)
            assert torch.equal(part, expected[first:end]), (first, end)


@pytest.mark.parametrize("attend", KINDS, ids=["reference", "compiled"])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize(("heads", "value_dim"), [((6, 1, 24), 16), ((20, 1, 80), 64)], ids=str)
def test_values_within_keys_are_right_and_leave_each_query_its_bits(
    attend: Attend, heads: tuple[int, int, int], value_dim: int, soft_cap: float | None
) -> None:
    lens = ([1, 1, 1, 70, 3, 200], [300, 1, 128, 70, 257, 200])
    case = make_case(*lens, heads, value_dim=value_dim, device="cpu")
    exact = exact_attention(case, 0.3, None, soft_cap)
    torch.testing.assert_close(_attend(attend, case, None, soft_cap, 2).double(), exact, atol=2e-5, rtol=2e-5)
    whole = make_case([300], [300], heads, value_dim=value_dim, device="cpu", dtype=torch.bfloat16)
    expected = _attend(attend, whole, None, soft_cap)
    for first, end in ((0, 130), (129, 130), (130, 300), (299, 300)):
        assert torch.equal(_attend(attend, _chunk(whole, first, end), None, soft_cap, 2), expected[first:end])


@pytest.mark.parametrize("attend", KINDS, ids=["reference", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_has_the_same_bits_in_a_crowd(attend: Attend, dtype: torch.dtype) -> None:
    heads = (8, 2, 64)
    crowd = make_case([1] * 40 + [5, 90], [7 * n + 1 for n in range(40)] + [140, 90], heads, device="cpu", dtype=dtype)
    together, start = _attend(attend, crowd, None, None, 2), 0
    for index, length in enumerate(crowd.query_lens):
        meta = replace(
            crowd.meta,
            slot_mapping_T=crowd.meta.slot_mapping_T[start : start + length],
            block_tables_SM=crowd.meta.block_tables_SM[index : index + 1],
            context_lens_S=crowd.meta.context_lens_S[index : index + 1],
            cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
            num_decode_seqs=int(length == 1),
        )
        alone = replace(crowd, meta=meta, q_THD=crowd.q_THD[start : start + length])
        assert torch.equal(_attend(attend, alone, None, None), together[start : start + length])
        start += length


@pytest.mark.parametrize("attend", KINDS, ids=["reference", "compiled"])
@pytest.mark.parametrize(("heads", "window", "soft_cap"), CASES)
def test_sinks_are_right_and_leave_each_query_its_bits(
    attend: Attend, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    case = make_case([1, 1, 1, 70, 3, 200], [300, 1, 128, 70, 257, 200], heads, window=window, device="cpu")
    exact = exact_attention(case, 0.3, window, soft_cap, sinks_of(case))
    ours = _attend(attend, case, window, soft_cap, 2, sinks_of(case))
    torch.testing.assert_close(ours.double(), exact, atol=2e-5, rtol=2e-5)
    for dtype in (torch.float32, torch.bfloat16):
        whole = make_case([300], [300], heads, device="cpu", dtype=dtype)
        expected = _attend(attend, whole, window, soft_cap, 1, sinks_of(whole))
        for first, end in ((0, 130), (130, 300), *((query, query + 1) for query in range(120, 300, 9))):
            part = _attend(attend, _chunk(whole, first, end), window, soft_cap, 2, sinks_of(whole))
            assert torch.equal(part, expected[first:end]), (dtype, first, end)


@pytest.mark.parametrize("attend", KINDS, ids=["reference", "compiled"])
def test_reads_an_fp8_cache_and_leaves_padded_rows_zero(attend: Attend) -> None:
    case = make_case([1, 4], [20, 9], (4, 2, 16), device="cpu")
    exact = exact_attention(replace(case, k_cache=case.k_cache.to(FP8), v_cache=case.v_cache.to(FP8)), 0.3, None, None)
    padded = replace(
        case,
        q_THD=torch.cat((case.q_THD, torch.ones(3, 4, 16))),
        k_cache=case.k_cache.to(FP8),
        v_cache=case.v_cache.to(FP8),
        meta=replace(case.meta, slot_mapping_T=torch.cat((case.meta.slot_mapping_T, torch.full((3,), -1)))),
    )
    out = _attend(attend, padded, None, None)
    torch.testing.assert_close(out[:5].double(), exact, atol=2e-5, rtol=2e-5)
    assert not out[5:].any()


@pytest.mark.parametrize("soft_cap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_this_processors_attention_does_not_depend_on_the_place(dtype: torch.dtype, soft_cap: float | None) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    assert is_invariant_attention(16, 8, 64, 64, soft_cap, dtype)
    assert is_invariant_attention(16, 1, 80, 64, soft_cap, dtype)
    torch.set_num_threads(before)


def _chunk(whole: Case, start: int, end: int) -> Case:
    meta = replace(
        whole.meta,
        slot_mapping_T=whole.meta.slot_mapping_T[start:end],
        context_lens_S=torch.tensor([end], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
        num_decode_seqs=int(end - start == 1),
        max_query_len=end - start,
        max_context_len=end,
    )
    return replace(whole, q_THD=whole.q_THD[start:end], meta=meta)
