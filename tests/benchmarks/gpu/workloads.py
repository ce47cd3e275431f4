"""A process with one loaded engine that measures item after item: `python -m tests.benchmarks.gpu.workloads FILE`.

The file is JSON: the stage, the items, and where results go. A result is written as soon as it is there, so that a
process stopped at its limit loses one item.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bulkrun.launch.bench.engine import ModelChoice, load_for_bench
from bulkrun.launch.bench.roofline import device_rates, roofline_of
from bulkrun.launch.bench.throughput import Asked, throughput_of
from tests.benchmarks.gpu.items import Item, Prediction
from tests.benchmarks.gpu.results import Results


def measure(stage: str, items: list[Item], results: Results) -> None:
    """All items, which share shape and settings. Each draws other tokens: the prefix cache may hold earlier ones."""
    first = items[0]
    choice = ModelChoice(shape=first.shape, settings=first.settings)
    loaded = load_for_bench(choice)
    rates = device_rates(loaded) if any(item.roofline for item in items) else None
    for number, item in enumerate(items):
        asked = Asked(None, item.input_len, item.output_len, item.num_requests, item.shared_prefix)
        if item.roofline:
            assert rates is not None, "measured, because this item wants it"
            facts = roofline_of(choice, asked, loaded, rates, seed=number, trace=item.trace)
        else:
            facts = throughput_of(choice, asked, loaded, seed=number)
        results.add_item(stage, item, facts={**facts, "settings": item.settings})


def _item(raw: dict[str, Any]) -> Item:
    return Item(**{**raw, "predictions": tuple(Prediction(**one) for one in raw["predictions"])})


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    measure(task["stage"], [_item(raw) for raw in task["items"]], Results(Path(task["results"])))
