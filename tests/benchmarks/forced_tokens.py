"""What it brings that tokens which a schema leaves no choice about cost no step: with it and by masks alone, in turns.

    python -m tests.benchmarks.forced_tokens [--model bundled:tiny] [--rows 200] [--rounds 3]

The same rows and the same engine; only whether constraints say what is forced is another. Greedy outputs of both must
be equal: it ends with an error where they are not (in bf16 a near-tie may go the other way; say `--dtype float32`).
Prints one JSON object: seconds of each round, the ratio of their medians, steps, and the share of forced tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import bulkrun
from bulkrun.request import EngineStats
from bulkrun.text.constraint import GrammarConstraint
from tests.benchmarks.invoice import SCHEMA
from tests.benchmarks.machine import commit, machine


def prompts(rows: int) -> list[list[dict[str, str]]]:
    said = "Invoice {0} of {1} May to customer number {2}, for {3} boxes: as JSON."
    texts = [said.format(1000 + 37 * n, 1 + n % 28, n * n % 977, 1 + n % 13) for n in range(rows)]
    return [[{"role": "user", "content": text}] for text in texts]


def masks_alone() -> AbstractContextManager[object]:
    def nothing(_: GrammarConstraint) -> Sequence[int]:
        return ()

    return patch.object(GrammarConstraint, "forced_tokens", nothing)


def timed(llm: bulkrun.LLM, rows: int) -> tuple[float, list[str], EngineStats]:
    """Seconds, outputs, and what the engine counted meanwhile."""
    engine = llm._shared.engine
    before, began = engine.stats(), time.perf_counter()
    params = {"max_tokens": 256, "temperature": 0, "structured_outputs": {"json": SCHEMA}}
    texts = [result.text for result in llm.chat(prompts(rows), params)]
    seconds, after = time.perf_counter() - began, engine.stats()
    counted = ("num_steps", "num_output_tokens", "num_forced_tokens")
    return seconds, texts, EngineStats(**{name: getattr(after, name) - getattr(before, name) for name in counted})


def compare(model: str, dtype: str, rows: int, rounds: int) -> dict[str, Any]:
    llm = bulkrun.LLM(model, dtype=dtype)
    sides = {"forced": nullcontext, "masks alone": masks_alone}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    texts: dict[str, list[str]] = {}
    counts: dict[str, EngineStats] = {}
    timed(llm, min(rows, 8))  # what is made once
    for _ in range(rounds):
        for name, side in sides.items():
            with side():
                took, texts[name], counts[name] = timed(llm, rows)
            seconds[name].append(round(took, 2))
    assert texts["forced"] == texts["masks alone"], "outputs differ"
    forced = counts["forced"]
    return {
        "benchmark": "forced_tokens",
        "model": model,
        "dtype": dtype,
        "rows": rows,
        "seconds": seconds,
        "speedup": round(statistics.median(seconds["masks alone"]) / statistics.median(seconds["forced"]), 2),
        "steps": {name: one.num_steps for name, one in counts.items()},
        "output_tokens": forced.num_output_tokens,
        "forced_share": round(forced.num_forced_tokens / forced.num_output_tokens, 2),
        "machine": machine(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(compare(options.model, options.dtype, options.rows, options.rounds)))


if __name__ == "__main__":
    main()
