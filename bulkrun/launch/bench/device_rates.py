"""What this device does at best: its GEMM rate on the model's own shapes, and how fast it reads memory.

Measured with the operations the engine has (`bulkrun.ops`), so that a share of 100% means that nothing but them runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from bulkrun.launch.bench.ceilings import DeviceRates
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.ops import fp8_linear, int8_linear, linear, pack_linear_weight, quantize_rows
from bulkrun.ops.cpu.int8_linear import pack_int8_
from bulkrun.ops.matmul.int8_linear import Int8Weight, quantize_int8

_BEST_OF = 5
_HEAT_S = 1.0  # for so long, and once more while it is timed: then a GPU's power, not its clock, is what limits it
_ROUND_S = 0.05  # long enough that starting the clock does not count
_READ_BYTES = {"cpu": 512 * 2**20, "cuda": 4 * 2**30}  # far beyond any cache
_SQUARE = {"cpu": 1024, "cuda": 8192}


@torch.inference_mode()
def measure_device(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, num_rows: int, quantization: str | None = None
) -> DeviceRates:
    """The best of several rounds each; `num_rows`: tokens of a full step. Needs some memory beside the engine's.

    Of a GPU the products' rate over a second is measured too: it keeps to its power by a lower clock, which a round of
    50 ms ends before (an H200 multiplied at 805 TFLOP/s for so long, at 674 from then on).
    quantization: the rate of products with such weights, the quantizing of tokens included (lm_head's are not so).
    """
    best_flop_s, sustained_flop_s = 0.0, None
    for rows, inner, outer in _gemm_shapes(config, device, num_rows):
        x = torch.randn(rows, inner, dtype=dtype, device=device)
        weight = torch.randn(outer, inner, dtype=dtype, device=device)
        product, flops = _product(x, weight, quantization), 2 * rows * inner * outer
        best_flop_s = max(best_flop_s, flops / _best_seconds(product, device))
    if device.type == "cuda":  # the last one, a square, is as fast as any
        sustained_flop_s = flops / _sustained_seconds(product, device)
    return DeviceRates(best_flop_s, _read_bytes_s(device), sustained_flop_s)


def _product(x: torch.Tensor, weight: torch.Tensor, quantization: str | None) -> Callable[[], torch.Tensor]:
    """`x @ weight.T` as the engine's layers do it."""
    if quantization == "fp8":
        return partial(fp8_linear, x, *quantize_rows(weight), None)
    if quantization == "int8":
        return partial(int8_linear, x, pack_int8_(Int8Weight(*quantize_int8(weight))), None)
    return partial(linear, x, pack_linear_weight(weight), None)


def _gemm_shapes(config: ModelConfig, device: torch.device, num_rows: int) -> Iterator[tuple[int, int, int]]:
    """Rows, inner and outer size: the model's widest products at a full step, and a plain square one."""
    yield num_rows, config.hidden_size, 2 * config.intermediate_size
    yield num_rows, config.intermediate_size, config.hidden_size
    size = _SQUARE[device.type]
    yield size, size, size


def _read_bytes_s(device: torch.device) -> float:
    """The faster of two ways to read a large matrix once: a sum, and a product with a vector."""
    num_columns = 4096
    values = torch.ones(_READ_BYTES[device.type] // (4 * num_columns), num_columns, device=device)
    vector = torch.ones(num_columns, device=device)
    seconds = min(_best_seconds(values.sum, device), _best_seconds(lambda: values @ vector, device))
    return values.numel() * values.element_size() / seconds


def _best_seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of one call, in the best of several rounds."""
    once = _timed(run, 1, device)
    calls = max(1, round(_ROUND_S / max(once, 1e-6)))
    return min(_timed(run, calls, device) / calls for _ in range(_BEST_OF))


def _sustained_seconds(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    """Seconds of one call among many, after as many."""
    calls = max(1, round(_HEAT_S / _timed(run, 1, device)))
    _timed(run, calls, device)
    return _timed(run, calls, device) / calls


def _timed(run: Callable[[], torch.Tensor], calls: int, device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
