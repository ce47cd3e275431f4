"""How far a run is from what the device allows: measured rates, the ceilings they make, and the achieved share."""

from __future__ import annotations

from typing import Any

from bulkrun.launch.bench.ceilings import Ceilings, ModelCost, ceilings
from bulkrun.launch.bench.engine import ModelChoice, load_for_bench
from bulkrun.launch.bench.measure import check_lengths, run_workload, warm_up
from bulkrun.launch.bench.throughput import Asked, throughput_facts


def bench_roofline(choice: ModelChoice, asked: Asked) -> dict[str, Any]:
    """The throughput benchmark, and its shares of SERIAL, MAX and NanoFlow-optimal on this device.

    `share_outside_forward`: of the run's time, what was not spent in the model; None on a GPU, where the host's clock
    does not say when the device works.
    """
    loaded = load_for_bench(choice)
    from bulkrun.launch.bench.device_rates import measure_device
    from bulkrun.launch.bench.forward_timer import timed_forward

    engine, config = loaded.engine, loaded.engine.config
    cost = ModelCost.of(loaded.config, config.dtype.itemsize)
    work = asked.work(loaded)
    check_lengths(work, engine.max_model_len)
    rates = measure_device(loaded.config, config.dtype, config.device, config.max_num_batched_tokens)
    warm_up(engine, work)
    with timed_forward(engine) as forward:
        measured = run_workload(engine, work)
    return {
        **throughput_facts(choice, asked, loaded, measured),
        "steps": len(measured.widths),
        "gemm_tflop_s": round(rates.gemm_flop_s / 1e12, 4),
        "read_gb_s": round(rates.read_bytes_s / 1e9, 2),
        **_shares(ceilings(cost, work, rates), measured.wall_s),
        "share_outside_forward": None if forward is None else round(1 - forward.seconds / measured.wall_s, 4),
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
