"""How far a run is from what the device allows: measured rates, the ceilings they make, achieved shares, op by op."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import Any

from bulkrun.launch.bench.ceilings import Ceilings, DeviceRates, ModelCost, ceilings, known_shape
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.measure import check_lengths, run_workload, warm_up
from bulkrun.launch.bench.op_table import idle_shares, op_table
from bulkrun.launch.bench.throughput import Asked, throughput_facts
from bulkrun.launch.bench.workload import Work
from bulkrun.models.config.model_config import ModelConfig

_SEED_OF_TRACE = 1000  # other tokens than the main run's, which may still be in the prefix cache


def bench_roofline(choice: ModelChoice, asked: Asked) -> dict[str, Any]:
    """The throughput benchmark, its shares of SERIAL, MAX and NanoFlow-optimal on this device, and where time goes."""

    def check(config: ModelConfig) -> None:
        known_shape(config)
        asked.check(choice.model_len(config))

    loaded = load_for_bench(choice, check)
    return roofline_of(choice, asked, loaded, device_rates(loaded))


def device_rates(loaded: LoadedModel) -> DeviceRates:
    """Measured beside the idle engine."""
    from bulkrun.launch.bench.device_rates import measure_device

    config = loaded.engine.config
    num_rows = config.max_num_batched_tokens
    return measure_device(loaded.config, config.dtype, config.device, num_rows, loaded.quantization)


def roofline_of(
    choice: ModelChoice, asked: Asked, loaded: LoadedModel, rates: DeviceRates, seed: int = 0, trace: bool = True
) -> dict[str, Any]:
    """One workload on a loaded engine. `trace`: then a few steps for `idle` and `ops` (see `op_table`), which takes as
    long as filling the engine again."""
    engine = loaded.engine
    cost = ModelCost.of(loaded.config, engine.config.kv_cache_dtype.itemsize)
    work = asked.work(loaded, seed)
    check_lengths(work, engine.max_model_len)
    warm_up(engine, work)
    measured = run_workload(engine, work)
    return {
        **throughput_facts(choice, asked, loaded, measured),
        "steps": len(measured.widths),
        "gemm_tflop_s": round(rates.gemm_flop_s / 1e12, 4),
        "read_gb_s": round(rates.read_bytes_s / 1e9, 2),
        **_shares(ceilings(cost, work, rates), measured.wall_s),
        **sustained_shares(cost, work, rates, measured.wall_s),
        **(traced_facts(asked, loaded, rates, min(len(work), engine.max_num_seqs), seed) if trace else {}),
    }


def traced_facts(asked: Asked, loaded: LoadedModel, rates: DeviceRates, width: int, seed: int) -> dict[str, Any]:
    """`idle` and `ops` of a few steps with `width` sequences, traced (see `op_table`)."""
    from bulkrun.launch.bench.traced_run import trace_steps

    more = chain.from_iterable(asked.work(loaded, seed + another) for another in count(_SEED_OF_TRACE))
    traced = trace_steps(loaded.engine, more, width)
    idle = None if traced.plain is None else idle_shares(traced.plain)
    return {
        "idle": None if idle is None else {**idle, "slowdown": round(traced.slowdown, 3)},
        "ops": op_table(traced.by_op, traced.calls, rates),
    }


def sustained_shares(cost: ModelCost, work: Sequence[Work], rates: DeviceRates, wall_s: float) -> dict[str, float]:
    """The shares that a run has of what the device does for longer than a moment, where that was measured."""
    if rates.sustained_flop_s is None:
        return {}
    limits = ceilings(cost, work, rates._replace(gemm_flop_s=rates.sustained_flop_s))
    return {
        "sustained_gemm_tflop_s": round(rates.sustained_flop_s / 1e12, 4),
        "share_of_sustained_serial": round(limits.serial_s / wall_s, 4),
        "share_of_sustained_nanoflow": round(limits.nanoflow_s / wall_s, 4),
    }


def _shares(limits: Ceilings, wall_s: float) -> dict[str, float]:
    return {
        "gemm_s": round(limits.gemm_s, 4),
        "kv_s": round(limits.kv_s, 4),
        "serial_s": round(limits.serial_s, 4),
        "max_s": round(limits.max_s, 4),
        "nanoflow_s": round(limits.nanoflow_s, 4),
        "share_of_serial": round(limits.serial_s / wall_s, 4),
        "share_of_max": round(limits.max_s / wall_s, 4),
        "share_of_nanoflow": round(limits.nanoflow_s / wall_s, 4),
    }
