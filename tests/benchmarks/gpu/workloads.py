"""A process with one loaded engine that measures item after item: `python -m tests.benchmarks.gpu.workloads FILE`.

The file is JSON: the stage, the items, the seconds there are, what it is measured on, and where results go. A result is
written as soon as it is there, and again with its trace. An item's failure ends the process, whose engine and CUDA
context may be broken; who started it goes on with the rest in another one.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.ceilings import DeviceRates
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.roofline import device_rates, roofline_of, traced_facts
from bulkrun.launch.bench.throughput import Asked, throughput_of
from tests.benchmarks.gpu.items import TRACE_S, Item, Prediction, fitted
from tests.benchmarks.gpu.results import Results

_TRACEBACK = 4000  # characters


def measure(stage: str, items: list[Item], results: Results, limit_s: float) -> None:
    """Those items, which share shape and settings, that fit. Each draws other tokens: the cache may hold earlier ones.

    Raises what an item's run raises, once its traceback is written.
    """
    end = time.monotonic() + limit_s
    choice = ModelChoice(shape=items[0].shape, settings=items[0].settings)
    loaded = load_for_bench(choice)
    rates = device_rates(loaded) if any(item.roofline for item in items) else None
    for seed, item in enumerate(items):
        left_s = end - time.monotonic()
        for fitting in fitted([item], left_s, pace=results.pace(item.shape), is_loaded=True):
            try:
                facts = _facts(fitting, choice, loaded, rates, seed)
            except Exception:
                results.add_item(stage, item, error=traceback.format_exc()[-_TRACEBACK:])
                raise
            results.add_item(stage, item, facts=facts)
            if item.trace and end - time.monotonic() > TRACE_S:
                _add_trace(results, stage, fitting, facts, loaded, rates, seed)


def _facts(
    item: Item, choice: ModelChoice, loaded: LoadedModel, rates: DeviceRates | None, seed: int
) -> dict[str, Any]:
    asked, before = _asked(item), loaded.engine.stats().num_preemptions
    if item.roofline:
        assert rates is not None, "measured, because an item wants it"
        facts = roofline_of(choice, asked, loaded, rates, seed=seed, trace=False)
    else:
        facts = throughput_of(choice, asked, loaded, seed=seed)
    return {
        **facts,
        "guessed_s": item.seconds,
        "settings": item.settings,
        "preemptions": loaded.engine.stats().num_preemptions - before,
        **_engine_facts(loaded.engine),
    }


def _add_trace(
    results: Results,
    stage: str,
    item: Item,
    facts: dict[str, Any],
    loaded: LoadedModel,
    rates: DeviceRates | None,
    seed: int,
) -> None:
    """Raises what tracing raises; the result then has its traceback instead."""
    assert rates is not None, "an item with a trace has its roofline too"
    try:
        width = min(item.num_requests, loaded.engine.max_num_seqs)
        traced = traced_facts(_asked(item), loaded, rates, width, seed)
    except Exception:
        results.add_item(stage, item, facts={**facts, "trace_error": traceback.format_exc()[-_TRACEBACK:]})
        raise
    results.add_item(stage, item, facts={**facts, **traced})


def _engine_facts(engine: LLMEngine) -> dict[str, Any]:
    config, graphs = engine.config, engine.model_runner.graphs
    return {
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "pool_blocks": config.num_blocks,
        "pool_tokens": config.num_blocks * config.block_size,
        "captured_graphs": 0 if graphs is None else graphs.num_captured,
    }


def _asked(item: Item) -> Asked:
    return Asked(None, item.input_len, item.output_len, item.num_requests, item.shared_prefix)


def _item(raw: dict[str, Any]) -> Item:
    return Item(**{**raw, "predictions": tuple(Prediction(**one) for one in raw["predictions"])})


def main(path: Path) -> None:
    task = json.loads(path.read_text(encoding="utf-8"))
    results = Results(Path(task["results"]), tuple(map(Path, task["earlier"])), task["hardware"])
    measure(task["stage"], [_item(raw) for raw in task["items"]], results, task["limit_s"])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
