"""Paged attention in Triton beside exact dense attention; in every cache, slots that must not be read are NaN."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops.attention.metadata import AttentionMetadata
from bulkrun.ops.matmul.fp8 import FP8
from bulkrun.ops.triton import decode_attention, partial_results, shared_prefix
from bulkrun.ops.triton import paged_attention as module
from bulkrun.ops.triton.attention_tile import packed_rows
from bulkrun.ops.triton.paged_attention import paged_attention
from bulkrun.ops.triton.shared_prefix import shared_prefix_attention
from bulkrun.windows import Chunks, Window
from tests.ops.prefix_groups import prefixes_of
from tests.ops.triton.attention_cases import Case, exact_attention, make_case, sinks_of
from tests.ops.triton.far_memory import far_memory
from tests.processor import needs_even_products

ERROR = {torch.float32: 3e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # a few roundings of values near one


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of one tile, so that a short context has several."""
    monkeypatch.setattr(partial_results, "CHUNK", 64)


def attend(
    case: Case, window: Window | None = None, soft_cap: float | None = None, sinks_H: torch.Tensor | None = None
) -> torch.Tensor:
    scale = case.q_THD.shape[-1] ** -0.5
    return paged_attention(
        case.q_THD, case.k_cache, case.v_cache, case.meta,
        scale=scale, sliding_window=window, soft_cap=soft_cap, sinks_H=sinks_H,
    )  # fmt: skip


def check(
    case: Case, window: Window | None = None, soft_cap: float | None = None, sinks_H: torch.Tensor | None = None
) -> None:
    ours, error = attend(case, window, soft_cap, sinks_H), ERROR[case.q_THD.dtype]
    exact = exact_attention(case, case.q_THD.shape[-1] ** -0.5, window, soft_cap, sinks_H)
    assert ours.dtype == case.q_THD.dtype
    torch.testing.assert_close(ours.double().cpu(), exact, atol=error, rtol=error)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 1, 70, Chunks(50), Chunks(64), Chunks(128)])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_decode_over_several_chunks(device: str, window: Window | None, soft_cap: float | None) -> None:
    case = make_case([1] * 4, [200, 1, 64, 65], (6, 2, 16), window=window, device=device)
    check(case, window, soft_cap)


@pytest.mark.parametrize("heads", [(2, 2, 16), (20, 1, 16)], ids=str)
def test_a_key_head_per_query_head_and_one_for_all(device: str, heads: tuple[int, int, int]) -> None:
    check(make_case([1, 1, 1, 30], [1, 130, 17, 41], heads, block_size=3, device=device))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (70, None), (Chunks(90), None), (None, 0.7)])
@pytest.mark.parametrize("heads", [(6, 2, 16), (5, 1, 80)], ids=str)
def test_sinks_of_decode_in_one_part_and_several_and_of_prompts(
    device: str, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    case = make_case([1, 1, 1, 1, 70, 3], [200, 1, 64, 65, 70, 100], heads, window=window, device=device)
    check(case, window, soft_cap, sinks_of(case))


@pytest.mark.parametrize("sink", [-1000.0, 90.0, 1000.0])
def test_a_sink_may_leave_everything_or_nothing(device: str, sink: float) -> None:
    case = make_case([1, 1, 5], [600, 20, 9], (4, 2, 16), device=device)
    check(case, sinks_H=torch.full((4,), sink, device=device))


def test_decode_over_chunks_of_the_real_size(device: str) -> None:
    check(make_case([1, 1], [1030, 512], (2, 1, 16), block_size=16, device=device))


@pytest.mark.parametrize("window", [None, 5, Chunks(8)])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_prompt_chunks(device: str, window: Window | None, soft_cap: float | None) -> None:
    case = make_case([70, 3, 1], [70, 100, 9], (6, 2, 16), num_decode_seqs=0, window=window, device=device)
    check(case, window, soft_cap)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 512])
def test_mixed_steps_of_every_head_dim(device: str, head_dim: int) -> None:
    check(make_case([1, 9, 2], [33, 9, 40], (5, 1, head_dim), block_size=16, device=device))


ODD_GROUPS = [(1, 1, 256), (6, 2, 64), (5, 1, 128), (6, 1, 80), (7, 1, 128)]


@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (40, 0.7), (Chunks(48), None)])
@pytest.mark.parametrize("heads", [*ODD_GROUPS, (71, 1, 64)], ids=str)
def test_chunks_in_tiles_of_any_group(
    device: str, heads: tuple[int, int, int], window: Window | None, soft_cap: float | None
) -> None:
    """The rows left over at a tile's end would be the next tile's token. Of 71 heads a tile holds one token."""
    lens = ([1, 61, 3, 27], [33, 61, 90, 95]) if heads[0] < 71 else ([5, 2], [5, 70])
    case = make_case(*lens, heads, window=window, dtype=torch.float16, device=device)
    check(case, window, soft_cap)


@pytest.mark.parametrize(
    ("group", "tokens"), [(1, 128), (3, 42), (4, 32), (5, 25), (6, 21), (7, 18), (71, 1), (200, 1)]
)
def test_a_tile_holds_as_many_tokens_as_its_rows_do(group: int, tokens: int) -> None:
    assert packed_rows(128, group) == (256 if group == 200 else 128, tokens)


def test_half_precision(device: str) -> None:
    check(make_case([1, 40], [90, 70], (8, 2, 64), dtype=torch.float16, device=device))


def test_rows_of_no_sequence_and_sequences_without_context_are_zeros(device: str) -> None:
    case = make_case([1, 1, 4], [9, 0, 4], (4, 2, 16), num_decode_seqs=2, device=device)
    padded_meta = dataclasses.replace(
        case.meta,
        block_tables_SM=torch.cat((case.meta.block_tables_SM, torch.zeros_like(case.meta.block_tables_SM[:2]))),
        context_lens_S=torch.cat((case.meta.context_lens_S, case.meta.context_lens_S.new_zeros(2))),
        cu_seqlens_q=torch.cat((case.meta.cu_seqlens_q, case.meta.cu_seqlens_q.new_full((2,), 6))),
        is_padded=True,
    )
    plain = attend(case)
    q_padded = torch.cat((case.q_THD, torch.randn(3, 4, 16, device=device)))
    padded = attend(dataclasses.replace(case, q_THD=q_padded, meta=padded_meta))
    assert torch.equal(padded[:6], plain)
    assert plain[0].any() and plain[2:].any()
    assert not padded[6:].any() and not padded[1].any()


@pytest.mark.usefixtures("small_chunks")
def test_a_sequence_has_the_same_bits_alone_and_in_a_crowd(device: str) -> None:
    crowd = make_case([1, 1, 1], [60, 40, 200], (2, 1, 16), device=device)
    meta = dataclasses.replace(
        crowd.meta,
        block_tables_SM=crowd.meta.block_tables_SM[:1],
        context_lens_S=crowd.meta.context_lens_S[:1],
        cu_seqlens_q=crowd.meta.cu_seqlens_q[:2],
        num_decode_seqs=1,
        max_context_len=60,  # so that it is written without a merge
    )
    alone = dataclasses.replace(crowd, q_THD=crowd.q_THD[:1], meta=meta)
    assert torch.equal(attend(alone), attend(crowd)[:1])


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 70, Chunks(80)])
def test_bounds_that_are_too_large_change_no_bit(device: str, window: Window | None) -> None:
    """A captured graph is launched for the longest contexts it may meet."""
    case = make_case([1, 1, 7], [60, 130, 9], (2, 1, 16), window=window, device=device)
    meta = dataclasses.replace(case.meta, max_context_len=500, max_query_len=64)
    assert torch.equal(attend(dataclasses.replace(case, meta=meta), window), attend(case, window))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 70, Chunks(80)])
def test_some_sequences_at_a_time_have_the_same_bits(
    device: str, window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the longest context would make partial results of all sequences too large."""
    case = make_case([1] * 5 + [3], [200, 1, 64, 65, 130, 9], (2, 1, 16), window=window, device=device)
    expected = attend(case, window)
    monkeypatch.setattr(module, "_MAX_CHUNKS", 9)
    assert torch.equal(attend(case, window), expected)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 70, Chunks(80)])
def test_one_long_context_among_short_ones_has_the_same_bits_in_the_room_that_all_need(
    device: str, window: Window | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for partial results is that of the contexts together, not of the longest one times their number."""
    case = make_case([1] * 6, [70, 1, 700, 64, 65, 20], (2, 1, 16), window=window, device=device)
    expected = attend(case, window)
    rooms = []
    allocate = partial_results.PartialResults.allocate

    def remember(*args: Any) -> partial_results.PartialResults:
        rooms.append(allocate(*args))
        rooms[-1].out.fill_(torch.nan)
        return rooms[-1]

    monkeypatch.setattr(partial_results.PartialResults, "allocate", remember)
    meta = dataclasses.replace(case.meta, max_decode_keys=sum(case.meta.context_lens_S.tolist()))
    assert torch.equal(attend(dataclasses.replace(case, meta=meta), window), expected)
    (room,) = rooms
    assert room.out.shape[0] <= 920 // 64 + 6


@pytest.mark.usefixtures("small_chunks")
def test_few_programs_take_several_chunks_each(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in every large step, where there are fewer programs than chunks of the longest contexts."""
    case = make_case([1] * 3, [330, 20, 129], (2, 1, 16), device=device)
    expected = attend(case)
    monkeypatch.setattr(decode_attention, "_ENOUGH_PROGRAMS", 1)
    assert torch.equal(attend(case), expected)


def _first_key(context: int, window: Window) -> int:
    if isinstance(window, Chunks):
        return max(context - 1, 0) // window.size * window.size
    return max(context - window, 0)


@settings(max_examples=100)
@given(
    contexts=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    window=st.none() | st.integers(1, 1500) | st.builds(Chunks, st.integers(1, 1500)),
    has_prefixes=st.booleans(),
    at_once=st.integers(1, 40),
    data=st.data(),
)
def test_no_two_parts_have_one_place_and_all_have_one(
    contexts: list[int], window: Window | None, has_prefixes: bool, at_once: int, data: st.DataObject
) -> None:
    has_prefixes = has_prefixes and window is None
    prefixes = [64 * data.draw(st.integers(0, context // 64)) if has_prefixes else 0 for context in contexts]
    context_lens_S = torch.tensor(contexts, dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    meta = AttentionMetadata(
        context_lens_S, context_lens_S, context_lens_S, context_lens_S, len(contexts), 1, max(contexts), sum(contexts)
    )
    some = slice(0, min(at_once, len(contexts)))
    with mock.patch.object(partial_results, "_TILE", 16):  # of sequences counted at a time
        room = module._room_for_parts(torch.zeros(1, 1, 1), meta, some, window, has_prefixes=has_prefixes)
    free = 0
    for context, prefix, start in zip(contexts, prefixes, room.starts_S.tolist(), strict=False):
        first_key = prefix if window is None else _first_key(context, window)
        num_parts = -(-prefix // 512) + -(-context // 512) - first_key // 512
        assert num_parts <= room.max_parts
        if num_parts > 1:
            assert start >= free
            free = start + num_parts
    assert free <= room.out.shape[0]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("window", [None, 70, Chunks(80)])
def test_a_padded_step_has_the_bits_of_the_step_itself(device: str, window: Window | None) -> None:
    """As a captured graph sees it: sequences that are not there between decode and chunks, and tokens of nobody."""
    case = make_case([1, 1, 7, 20], [60, 130, 9, 33], (6, 2, 16), window=window, device=device)
    tables = case.meta.block_tables_SM
    nobody = torch.zeros_like(tables[:1])  # the null block, which is NaN here
    padded_meta = dataclasses.replace(
        case.meta,
        block_tables_SM=torch.cat((tables[:2], nobody.repeat(9, 1), tables[2:], nobody)),
        context_lens_S=torch.tensor([60, 130, *[0] * 9, 9, 33, 0], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, 1, *[2] * 10, 9, 29, 29], dtype=torch.int32, device=device),
        num_decode_seqs=11,
        max_query_len=36,
        max_context_len=500,
        max_decode_keys=1100,
        is_padded=True,
    )
    q_padded = torch.cat((case.q_THD, torch.full_like(case.q_THD[:7], torch.nan)))
    padded = attend(dataclasses.replace(case, q_THD=q_padded, meta=padded_meta), window)
    assert torch.equal(padded[:29], attend(case, window))
    assert not padded[29:].any()


def test_decode_sequences_that_pad_a_step_take_no_tile_from_its_prompts(device: str) -> None:
    """They have no token: there are more of them than the step has tokens behind its chunk."""
    case = make_case([1, 43], [9, 43], (6, 2, 16), device=device)  # a tile has room for 42
    tables = case.meta.block_tables_SM
    padded_meta = dataclasses.replace(
        case.meta,
        block_tables_SM=torch.cat((tables[:1], torch.zeros_like(tables[:1]).repeat(9, 1), tables[1:])),
        context_lens_S=torch.tensor([9, *[0] * 9, 43], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *[1] * 10, 44], dtype=torch.int32, device=device),
        num_decode_seqs=10,
        is_padded=True,
    )
    assert torch.equal(attend(dataclasses.replace(case, meta=padded_meta)), attend(case))


def test_queries_whose_heads_lie_apart_are_copied(device: str) -> None:
    case = make_case([1, 3], [9, 5], (4, 2, 16), device=device)
    apart = case.q_THD.transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(attend(dataclasses.replace(case, q_THD=apart)), attend(case))


@pytest.mark.usefixtures("small_chunks")
def test_chunks_that_hold_every_context_are_no_window(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So prefixes are shared, and tiles need no mask."""
    case = make_case([1, 1, 9], [150, 140, 70], (4, 2, 16), device=device, shared_blocks=32)
    shared = prefixes_of([([0, 1], 128)], 2, device)
    case = dataclasses.replace(case, meta=dataclasses.replace(case.meta, shared_prefixes=shared))
    calls = []
    monkeypatch.setattr(
        module, "shared_prefix_attention", lambda *a, **k: calls.append(shared_prefix_attention(*a, **k))
    )
    assert torch.equal(attend(case, Chunks(150)), attend(case))
    assert len(calls) == 2
    check(case, Chunks(149))
    assert len(calls) == 2


@needs_even_products
def test_how_a_prompt_is_cut_changes_no_bit(device: str) -> None:
    whole = make_case([90], [90], (2, 1, 16), device=device)
    meta = dataclasses.replace(
        whole.meta,
        block_tables_SM=whole.meta.block_tables_SM.repeat(2, 1),
        context_lens_S=torch.tensor([37, 90], dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, 37, 90], dtype=torch.int32, device=device),
        max_query_len=53,
    )
    assert torch.equal(attend(dataclasses.replace(whole, meta=meta)), attend(whole))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300, Chunks(512)])
@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 2, 64), (8, 8, 80), (12, 4, 96), (16, 8, 256)], ids=str)
def test_large_bfloat16_steps(heads: tuple[int, int, int], window: Window | None) -> None:
    query_lens, context_lens = [1] * 6 + [700, 129, 5], [1, 2011, 523, 37, 512, 4000, 700, 463, 1328]
    case = make_case(query_lens, context_lens, heads, block_size=16, window=window, dtype=torch.bfloat16, device="cuda")
    check(case, window)
    check(case, window, soft_cap=30.0)


@pytest.mark.parametrize("dtype", [torch.float16, FP8, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str)
def test_addresses_beyond_32_bits(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last blocks of a cache of more than 2^31 elements, or pairs of fp8, are read, not those 2^32 before."""
    monkeypatch.setattr(shared_prefix, "_PLACES", 1)  # as many programs are interpreted
    q_dtype = torch.float16 if dtype == FP8 else dtype
    case = make_case([1, 1, 5], [70, 66, 20], (2, 1, 128), block_size=16, shared_blocks=4, dtype=q_dtype, device=device)
    shared = prefixes_of([([0, 1], 64)], 2, device)
    case = dataclasses.replace(case, meta=dataclasses.replace(case.meta, shared_prefixes=shared))
    cache = case.k_cache.to(dtype)  # of values too
    num_blocks = 2 ** (32 if dtype == FP8 else 31) // cache[0].numel() + len(cache)
    far = far_memory((num_blocks, *cache.shape[1:]), dtype, device)
    far[-len(cache) :] = cache
    meta = dataclasses.replace(case.meta, block_tables_SM=case.meta.block_tables_SM + (num_blocks - len(cache)))
    moved = dataclasses.replace(case, k_cache=far, v_cache=far, meta=meta)
    assert torch.equal(attend(moved), attend(dataclasses.replace(case, k_cache=cache, v_cache=cache)))
