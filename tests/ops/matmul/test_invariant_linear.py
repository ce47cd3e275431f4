"""Products of fixed tiles: right, and a row's bits are its own, on any number of threads."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch
import torch.nn.functional as F

from bulkrun.ops.matmul.invariant_linear import TILE_ROWS, invariant_linear, is_invariant_linear, make_panels
from bulkrun.ops.tile_workers import TileWorkers

SHAPES = [(48, 72), (384, 1153), (3072, 384), (1024, 3072)]


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, num_threads: int = 1) -> torch.Tensor:
    workers = TileWorkers(num_threads)
    padded = F.pad(x, (0, 0, 0, -x.shape[0] % TILE_ROWS))
    with workers.one_thread_each():
        return invariant_linear(padded, make_panels(weight), bias, workers)[: x.shape[0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "num_outputs"), SHAPES)
def test_product_is_right(size: int, num_outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(70, size), torch.randn(num_outputs, size) * size**-0.5, torch.randn(num_outputs)
    x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    exact = x.double() @ weight.double().T + bias.double()
    # float32 sums in any order; in bfloat16 the result is rounded once
    error = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 2**-8}
    torch.testing.assert_close(_multiply(x, weight, bias).double(), exact, **error)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "num_outputs"), SHAPES)
def test_a_row_has_the_same_bits_beside_any_others_on_any_threads(
    size: int, num_outputs: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(150, size).to(dtype), torch.randn(num_outputs, size).to(dtype)
    everything = _multiply(x, weight, None)
    for count in (1, 2, 9, 31, 32, 33, 64, 149):
        assert torch.equal(_multiply(x[:count], weight, None, count % 3 + 1), everything[:count])
        assert torch.equal(_multiply(x[-count:], weight, None), everything[-count:])
    order = torch.randperm(150)
    assert torch.equal(_multiply(x[order], weight, None, 2), everything[order])


def test_a_library_without_fixed_tiles_would_fail_that() -> None:
    """The plain product gives a row other bits in other batches on some processor, dtype or shape; here in float32."""
    if not torch.backends.mkl.is_available():
        pytest.skip("another library")
    torch.manual_seed(0)
    x, weight = torch.randn(150, 1024), torch.randn(3072, 1024)
    everything = F.linear(x, weight)
    assert any(not torch.equal(F.linear(x[:count], weight), everything[:count]) for count in range(1, 33))


def test_dependence_on_the_place_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(64, 32)
    assert is_invariant_linear(weight, weight.dtype)

    def careless(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = F.linear(x, weight, bias)
        out[-1] = F.linear(x[-1].flip(0), weight.flip(1), bias)  # the same sums in another order
        return out

    monkeypatch.setattr(import_module("bulkrun.ops.matmul.invariant_linear"), "linear", careless)
    assert not is_invariant_linear(weight, weight.dtype)
