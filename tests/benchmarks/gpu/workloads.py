"""A process with one loaded engine that measures item after item: `python -m tests.benchmarks.gpu.workloads FILE`.

The file is JSON: the stage, the items, the seconds there are, what it is measured on, and where results go. A result is
written as soon as it is there, and again with its trace. An item's failure ends the process, whose engine and CUDA
context may be broken; who started it goes on with the rest in another one. What hangs ends it too, and every thread's
traceback is on stderr.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.ceilings import DeviceRates
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.roofline import device_rates, roofline_of, traced_facts
from bulkrun.launch.bench.throughput import Asked, throughput_of
from tests.benchmarks.gpu.items import TRACE_S, Item, Prediction, fitted, longest_load_s, longest_s
from tests.benchmarks.gpu.results import UNENDED, Results

_TRACEBACK = 4000  # characters


@dataclass(frozen=True, slots=True)
class _Bench:
    """A loaded engine, and where its results go. `rates`: None where no item asks for them."""

    stage: str
    results: Results
    choice: ModelChoice
    loaded: LoadedModel
    rates: DeviceRates | None


def measure(stage: str, items: list[Item], results: Results, limit_s: float) -> None:
    """Those items, which share shape and settings, that fit. Each draws other tokens: the cache may hold earlier ones.

    Raises what an item's run raises, once its traceback is written.
    """
    end = time.monotonic() + limit_s
    choice = ModelChoice(shape=items[0].shape, settings=items[0].settings)
    with _at_most(longest_load_s()):
        loaded = load_for_bench(choice)
        rates = device_rates(loaded) if any(item.roofline for item in items) else None
    bench = _Bench(stage, results, choice, loaded, rates)
    for seed, item in enumerate(items):
        pace = results.pace(item.shape)
        for fitting in fitted([item], end - time.monotonic(), pace=pace, is_loaded=True):
            with _at_most(longest_s(fitting, pace)):
                facts = _add_run(bench, fitting, seed)
            if item.trace and end - time.monotonic() > TRACE_S:
                with _at_most(longest_s(fitting, pace)):
                    _add_trace(bench, fitting, facts, seed)


@contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """A process that is in there for longer ends, wherever it hangs: the watch needs neither Python nor the device."""
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _add_run(bench: _Bench, item: Item, seed: int) -> dict[str, Any]:
    bench.results.add_item(bench.stage, item, error=UNENDED)
    try:
        facts = _facts(bench, item, seed)
    except Exception:
        bench.results.add_item(bench.stage, item, error=traceback.format_exc()[-_TRACEBACK:])
        raise
    bench.results.add_item(bench.stage, item, facts=facts)
    return facts


def _facts(bench: _Bench, item: Item, seed: int) -> dict[str, Any]:
    loaded, asked = bench.loaded, _asked(item)
    before = loaded.engine.stats().num_preemptions
    if item.roofline:
        assert bench.rates is not None, "measured, because an item wants it"
        facts = roofline_of(bench.choice, asked, loaded, bench.rates, seed=seed, trace=False)
    else:
        facts = throughput_of(bench.choice, asked, loaded, seed=seed)
    return {
        **facts,
        "guessed_s": item.seconds,
        "settings": item.settings,
        "preemptions": loaded.engine.stats().num_preemptions - before,
        **_engine_facts(loaded.engine),
    }


def _add_trace(bench: _Bench, item: Item, facts: dict[str, Any], seed: int) -> None:
    """Raises what tracing raises; the result then has its traceback instead."""
    assert bench.rates is not None, "an item with a trace has its roofline too"
    try:
        width = min(item.num_requests, bench.loaded.engine.max_num_seqs)
        traced = traced_facts(_asked(item), bench.loaded, bench.rates, width, seed)
    except Exception:
        told = {**facts, "trace_error": traceback.format_exc()[-_TRACEBACK:]}
        bench.results.add_item(bench.stage, item, facts=told)
        raise
    bench.results.add_item(bench.stage, item, facts={**facts, **traced})


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
