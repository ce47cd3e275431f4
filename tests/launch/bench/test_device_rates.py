"""Rates of a device whose calls take as long as is said here: what is divided by what, not how fast anything is."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from bulkrun.launch.bench import device_rates
from bulkrun.launch.bench.device_rates import measure_device

CPU = torch.device("cpu")
CONFIG = SimpleNamespace(hidden_size=64, intermediate_size=96)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "_READ_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(device_rates, "_SQUARE", {"cpu": 16})


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("fastest", "rows", "inner", "outer"), [(0, 10, 64, 192), (1, 10, 96, 64), (2, 16, 16, 16)])
def test_a_devices_rates_are_those_of_its_fastest_product_and_its_fastest_reading(
    monkeypatch: pytest.MonkeyPatch, fastest: int, rows: int, inner: int, outer: int
) -> None:
    """A product and its sum are two operations; a megabyte of floats is read by a sum, or by a product."""
    took = [1.0, 1.0, 1.0, 2.0, 0.5]
    took[fastest] = 1e-3
    shapes = []

    def seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
        shapes.append(tuple(run().shape))
        return took[len(shapes) - 1]

    monkeypatch.setattr(device_rates, "_best_seconds", seconds)
    rates = measure_device(CONFIG, torch.float32, CPU, 10)  # type: ignore[arg-type]
    assert shapes == [(10, 192), (10, 64), (16, 16), (), (64,)]
    assert rates.gemm_flop_s == pytest.approx(2 * rows * inner * outer / 1e-3)
    assert (rates.read_bytes_s, rates.sustained_flop_s) == (2**20 / 0.5, None)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each call takes a millisecond, in every second round two; the numbers of calls that were timed."""
    rounds: list[int] = []

    def took(run: object, calls: int, device: torch.device) -> float:
        rounds.append(calls)
        return calls * (1e-3 if len(rounds) % 2 else 2e-3)

    monkeypatch.setattr(device_rates, "_timed", took)
    return rounds


def test_the_time_of_a_call_is_that_of_the_best_of_some_rounds_of_many(timed: list[int]) -> None:
    assert device_rates._best_seconds(lambda: torch.ones(1), CPU) == pytest.approx(1e-3)
    assert timed == [1, 50, 50, 50, 50, 50], "each 50 ms"


def test_what_a_device_keeps_up_is_timed_over_a_second_after_another_one(timed: list[int]) -> None:
    assert device_rates._sustained_seconds(lambda: torch.ones(1), CPU) == pytest.approx(1e-3)
    assert timed == [1, 1000, 1000]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_the_rate_of_8_bits_is_that_of_products_in_8_bits(monkeypatch: pytest.MonkeyPatch, quantization: str) -> None:
    multiplied = []
    for name in ("linear", "fp8_linear", "int8_linear"):
        monkeypatch.setattr(device_rates, name, lambda *_, name=name: multiplied.append(name))
    monkeypatch.setattr(device_rates, "_best_seconds", lambda run, device: run() or 1.0)
    monkeypatch.setattr(device_rates, "_read_bytes_s", lambda device: 1.0)
    measure_device(CONFIG, torch.float32, CPU, 10, quantization)  # type: ignore[arg-type]
    assert multiplied == [f"{quantization}_linear"] * 3
