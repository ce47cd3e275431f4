"""How long the garbage collector interrupts a worker, with and without what was there before the first row frozen.

    python -m tests.benchmarks.gc_pauses [--rows 100000]

A run whose engine answers at once, in a process that has loaded torch and the engine as a worker has. Prints one JSON
line per variant: collections by generation, seconds in them, and the longest pause of a step.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.launch.processes.garbage import freeze_heap
from bulkrun.text.tokenizer import Tokenizer
from tests.benchmarks.million_rows import InstantEngine, corpus, job, plan, train_tokenizer, write_input
from tests.job.small_runs import make_runner

VARIANTS = ("as it was", "frozen")


class Pauses:
    """Collections by generation and how long they took, from the collector's own callbacks."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]
        self.seconds = [0.0, 0.0, 0.0]
        self.longest_s = 0.0
        self.found = 0  # objects in cycles
        self._began = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
            return
        took = time.perf_counter() - self._began
        self.counts[info["generation"]] += 1
        self.found += info["collected"]
        self.seconds[info["generation"]] += took
        self.longest_s = max(self.longest_s, took)


def work(folder: Path, variant: str) -> None:
    """Run the planned input and print what the collector did meanwhile."""
    import bulkrun.engine.llm_engine  # noqa: F401 - its objects are what a full collection goes through

    run, tokenizer = RunDir(folder / "run"), Tokenizer.from_dir(folder / "tokenizer")
    runner = make_runner(run, read_record(run), job(folder), InstantEngine(), decode=tokenizer.decode_batch)
    if variant == "frozen":
        freeze_heap()
    pauses = Pauses()
    gc.callbacks.append(pauses)
    cpu = time.process_time()
    outcome = runner.run()
    assert outcome.totals is not None
    print(
        json.dumps(
            {
                "variant": variant,
                "rows": outcome.totals.rows,
                "collections": pauses.counts,
                "gc_ms": [round(1000 * seconds, 1) for seconds in pauses.seconds],
                "found": pauses.found,
                "longest_ms": round(1000 * pauses.longest_s, 1),
                "cpu_seconds": round(time.process_time() - cpu, 1),
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.variant:
        return work(options.folder, options.variant)
    words = corpus()
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory(prefix="bulkrun-gc-") as name:
            folder = Path(name)
            train_tokenizer(words, folder / "tokenizer")
            write_input(words, options.rows, 20, folder / "input.parquet")
            plan(folder)
            command = [sys.executable, "-m", "tests.benchmarks.gc_pauses", "--folder", str(folder)]
            subprocess.run([*command, "--variant", variant], check=True)


if __name__ == "__main__":
    main()
