"""Shared-prefix attention beside exact dense attention, which knows no sharing."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from bulkrun.ops.triton import paged_attention, partial_results, shared_prefix
from tests.ops.prefix_groups import prefixes_of
from tests.ops.triton.attention_cases import Case, make_case, sinks_of
from tests.ops.triton.test_paged_attention import ODD_GROUPS, attend, check

HEADS = (6, 2, 16)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_results, "CHUNK", 64)


def share(case: Case, *groups: tuple[list[int], int]) -> Case:
    shared = prefixes_of(list(groups), case.meta.num_decode_seqs, case.q_THD.device)
    return dataclasses.replace(case, meta=dataclasses.replace(case.meta, shared_prefixes=shared))


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_a_prefix_of_two_chunks_or_one_and_a_half_or_half_a_chunk(
    device: str, soft_cap: float | None, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_results, "CHUNK", chunk)
    case = make_case([1] * 4 + [5], [250, 240, 415, 239, 239], HEADS, shared_blocks=58, device=device)
    shared = share(case, ([0, 3, 2], 192 if chunk == 128 else 128))
    check(shared, soft_cap=soft_cap)
    check(shared, soft_cap=soft_cap, sinks_H=sinks_of(case))


@pytest.mark.parametrize("places", [1, 3, 132])
def test_several_groups_in_any_order_and_sequences_in_none(
    device: str, places: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two groups of different prefix lengths; group sizes that fill no tile and more than one tile."""
    monkeypatch.setattr(shared_prefix, "_PLACES", places)  # few: a program does many pieces of work
    case = make_case([1] * 26, [140 + i for i in range(26)], HEADS, shared_blocks=33, device=device)
    check(share(case, (list(range(25, 3, -1)), 128), ([1, 3], 64)))


@pytest.mark.parametrize("heads", ODD_GROUPS, ids=str)
def test_tiles_of_any_group(device: str, heads: tuple[int, int, int]) -> None:
    """The rows left over at a tile's end would be the next tile's first sequence."""
    case = make_case([1] * 47, [76 + i for i in range(47)], heads, shared_blocks=17, dtype=torch.float16, device=device)
    check(share(case, (list(range(46, 3, -1)), 64), ([1, 3], 64)), soft_cap=0.7 if heads[0] == 6 else None)


@pytest.mark.parametrize(("max_chunks", "heads"), [(5, HEADS), (120, (4, 2, 16))])
def test_some_sequences_at_a_time_read_their_prefix_once_each_time(
    device: str, max_chunks: int, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence at a time, and 16 at a time, where one long context makes room for all too large."""
    monkeypatch.setattr(shared_prefix, "_PLACES", 4)  # each time as many programs are interpreted
    case = make_case([1] * 26, [140 + i for i in range(25)] + [400], heads, shared_blocks=33, device=device)
    case = share(case, (list(range(19, -1, -1)), 128), ([22, 24], 64))
    expected = attend(case)
    monkeypatch.setattr(paged_attention, "_MAX_CHUNKS", max_chunks)
    meta = dataclasses.replace(case.meta, max_context_len=max(case.meta.context_lens_S.tolist()))
    assert torch.equal(attend(dataclasses.replace(case, meta=meta)), expected)


def test_a_group_with_a_shorter_prefix_writes_no_more_parts_than_it_has(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those behind them are others'."""
    monkeypatch.setattr(shared_prefix, "_PLACES", 4)
    case = make_case([1] * 5, [300, 300, 70, 70, 300], (4, 2, 16), shared_blocks=64, device=device)
    check(share(case, ([0, 1], 256), ([2, 3], 64)))


@pytest.mark.parametrize("length", [64, 128, 192])
def test_a_prefix_that_is_the_whole_context(device: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_results, "CHUNK", 128)
    case = make_case([1, 1], [length, length], HEADS, shared_blocks=length // 4, device=device)
    check(share(case, ([0, 1], length)))
    check(share(case, ([0, 1], length)), sinks_H=sinks_of(case))


def test_nothing_is_shared_under_a_window(device: str) -> None:
    case = make_case([1, 1], [100, 140], HEADS, shared_blocks=17, window=20, device=device)
    assert torch.equal(attend(share(case, ([0, 1], 64)), 20), attend(case, 20))


def test_bounds_that_are_too_large_and_groups_of_nobody_change_no_bit(device: str) -> None:
    """A captured graph has room for the longest prefix and the most groups it may meet."""
    case = share(make_case([1] * 5, [150, 140, 215, 139, 139], HEADS, shared_blocks=33, device=device), ([4, 1], 128))
    shared = case.meta.shared_prefixes
    assert shared is not None
    roomy = dataclasses.replace(
        shared,
        seq_index=torch.cat((shared.seq_index, shared.seq_index.new_full((7,), 3))),
        cu_groups=torch.cat((shared.cu_groups, shared.cu_groups[-1:].repeat(4))),
        prefix_lens_G=torch.cat((shared.prefix_lens_G, shared.prefix_lens_G.new_full((4,), 64))),
    )
    meta = dataclasses.replace(case.meta, shared_prefixes=roomy, max_context_len=1000)
    assert torch.equal(attend(dataclasses.replace(case, meta=meta)), attend(case))


def test_the_prefix_is_read_through_one_block_table(device: str) -> None:
    """With the other sequences' tables pointing at NaN, the result stands: only the first sequence's is used."""
    case = make_case([1] * 3, [140] * 3, HEADS, shared_blocks=32, device=device)
    shared = share(case, ([1, 0, 2], 128))
    expected = attend(shared)
    tables = case.meta.block_tables_SM.clone()
    tables[[0, 2], :32] = 0  # the null block is NaN here
    blind = dataclasses.replace(shared, meta=dataclasses.replace(shared.meta, block_tables_SM=tables))
    assert math.isnan(case.k_cache[0].flatten()[0])
    assert torch.equal(attend(blind), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "value_dim"),
    [
        *(((32, 8, 128), None), ((16, 2, 64), None), ((16, 8, 256), None)),
        *(((16, 1, 576), 512), ((20, 1, 576), 512), ((128, 1, 576), 512), ((40, 1, 320), 256)),
    ],
    ids=str,
)
def test_large_bfloat16_groups(
    heads: tuple[int, int, int], value_dim: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial_results, "CHUNK", 512)
    lens = [1100 + 13 * i for i in range(70)]
    case = make_case(
        [1] * 70, lens, heads,
        value_dim=value_dim, block_size=16, shared_blocks=68, dtype=torch.bfloat16, device="cuda",
    )  # fmt: skip
    check(share(case, (list(range(40)), 1088), (list(range(45, 70)), 1024)))
