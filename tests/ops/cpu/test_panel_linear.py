"""Products with weights in panels, beside exact ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from bulkrun import ops
from bulkrun.ops.cpu.library import compiled_ops, library
from bulkrun.ops.cpu.panel_linear import can_pack_panels, compiles_panels, pack_panels, pack_panels_, panel_linear

DTYPES = [
    pytest.param(
        dtype,
        marks=pytest.mark.skipif(
            not can_pack_panels(torch.empty(32, 32, dtype=dtype)),
            reason="panels of it need AVX2, of bf16 AVX-512's own",
        ),
    )
    for dtype in (torch.float32, torch.bfloat16)
]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 47, 64, 127, 128, 129, 255, 256, 257, 300, 513, 700]


def random_weight(size: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).div_(size[1] ** 0.5).to(dtype)


@pytest.mark.skipif(library() is None, reason="no compiled ops on this machine: nobody packs panels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (64, 352), (320, 96)], ids=str)
def test_a_panel_holds_its_rows_word_by_word(size: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(dtype)
    per_word = 4 // dtype.itemsize
    expected = weight.view(size[0] // 32, 32, size[1] // per_word, per_word).transpose(1, 2).clone()
    assert torch.equal(pack_panels(weight), expected)
    assert torch.equal(pack_panels(weight.t().contiguous().t()), expected), "a weight that is not contiguous"
    address = weight.data_ptr()
    in_place = pack_panels_(weight)
    assert torch.equal(in_place, expected) and in_place.data_ptr() == address


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (64, 160), (416, 384)], ids=str)
def test_any_number_of_rows_equals_the_exact_product(
    size: tuple[int, int], num_threads: int, dtype: torch.dtype
) -> None:
    weight, bias, before = random_weight(size, dtype), torch.randn(size[0]).to(dtype), torch.get_num_threads()
    panels = pack_panels(weight)
    torch.set_num_threads(num_threads)
    try:
        for rows in ROWS:
            x = torch.randn(rows, size[1]).to(dtype)
            for use in (None, bias):
                exact = F.linear(x.double(), weight.double(), None if use is None else use.double())
                out = panel_linear(x, panels, use)
                torch.testing.assert_close(
                    out.double(), exact, atol=1e-5, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5
                )
    finally:
        torch.set_num_threads(before)


@each_dtype
def test_rows_have_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    panels, x = pack_panels(random_weight((96, 352), dtype)), torch.randn(700, 352).to(dtype)
    together = panel_linear(x, panels, None)
    for first, end in ((0, 1), (3, 20), (5, 12), (100, 140), (650, 700)):
        assert torch.equal(panel_linear(x[first:end], panels, None), together[first:end])


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2, 3])  # three share more rows than are multiplied at a time
@pytest.mark.parametrize("columns", [96, 608, 1376])  # on tiles: a few pairs, several groups, rows that are copied
def test_pairs_of_panels_that_do_not_stay_near_are_multiplied_in_slices(
    columns: int, num_threads: int, dtype: torch.dtype
) -> None:
    weight, before = random_weight((columns, 2080 * 4 // dtype.itemsize), dtype), torch.get_num_threads()
    panels, x = pack_panels(weight), torch.randn(600, weight.shape[1]).to(dtype)
    rtol = 2**-8 if dtype == torch.bfloat16 else 1e-5
    alone = torch.cat([panel_linear(few, panels, None) for few in x.split(30)])
    torch.testing.assert_close(alone.double(), F.linear(x.double(), weight.double()), atol=1e-5, rtol=rtol)
    torch.set_num_threads(num_threads)
    try:
        for rows in (33, 128, 129, 300, 600):
            assert torch.equal(panel_linear(x[:rows], panels, None), alone[:rows])
    finally:
        torch.set_num_threads(before)


@each_dtype
def test_rows_that_lie_apart_are_read_too(dtype: torch.dtype) -> None:
    panels, wide = pack_panels(random_weight((64, 64), dtype)), torch.randn(48, 128).to(dtype)
    for x in (wide[:40, :64], wide[:, :64]):  # the second are whole tiles
        assert torch.equal(panel_linear(x, panels, None), panel_linear(x.contiguous(), panels, None))
    assert panel_linear(wide[:0, :64], panels, None).shape == (0, 64)


@pytest.mark.skipif(not compiles_panels(torch.float32), reason="panels of float32 need a compiler and AVX2")
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("size", [(32, 32), (96, 64), (96, 352), (416, 384)], ids=str)
def test_bf16_with_rows_of_float32_counts_as_the_float32_it_is(size: tuple[int, int], num_threads: int) -> None:
    weight, bias, before = random_weight(size, torch.bfloat16), torch.randn(size[0]), torch.get_num_threads()
    narrow, wide = pack_panels(weight), pack_panels(weight.float())
    torch.set_num_threads(num_threads)
    try:
        for rows in ROWS:
            x = torch.randn(rows, size[1])
            for use in (None, bias):
                assert torch.equal(panel_linear(x, narrow, use), panel_linear(x, wide, use))
    finally:
        torch.set_num_threads(before)


def test_only_whole_panels_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert not any(can_pack_panels(torch.empty(size, dtype=dtype)) for size in ((32, 48), (40, 32)))
    assert not can_pack_panels(torch.empty(32, 32, dtype=torch.float16))
    monkeypatch.setenv("BULKRUN_CPU_OPS", "reference")
    compiled_ops.cache_clear()
    try:
        assert ops.pack_linear_weight(random_weight((32, 32), torch.bfloat16)).ndim == 2
    finally:
        compiled_ops.cache_clear()
