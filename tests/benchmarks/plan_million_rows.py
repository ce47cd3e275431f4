"""How long planning takes and how much memory: a synthetic Parquet input of short rows, planned in one process.

    python -m tests.benchmarks.plan_million_rows [--rows 1000000] [--words 70] [--tokenizer DIR]

Rows are words drawn from the standard library's source, a tenth of them behind one of 50 shared prefixes, and a
twentieth repeat an earlier row. The tokenizer is trained on the same text (byte-level BPE, 4096) unless a directory is
given. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from bulkrun.data.reader import open_input
from bulkrun.job.plan.planner import Planner
from bulkrun.job.run_dir import RunDir
from bulkrun.job.spec import JobSpec
from bulkrun.text.tokenizer import Tokenizer

BATCH = 10_000


def corpus() -> list[str]:
    """The words of the standard library's top-level modules."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return re.findall(r"\S+", "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in sources))


def train_tokenizer(words: list[str], folder: Path) -> None:
    """A byte-level BPE tokenizer of 4096 tokens, saved as a model directory."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=4096, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    lines = (" ".join(words[start : start + 50]) for start in range(0, min(len(words), 300_000), 50))
    backend.train_from_iterator(lines, trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))


def batches(words: list[str], rows: int, mean_words: int) -> Iterator[pa.RecordBatch]:
    """`rows` rows {id, text}, the same for the same arguments."""
    rng = random.Random(0)
    prefixes = [" ".join(rng.choices(words, k=40)) for _ in range(50)]
    seen: list[str] = []
    for start in range(0, rows, BATCH):
        texts = []
        for _ in range(min(BATCH, rows - start)):
            at = rng.randrange(len(words) - 4 * mean_words)
            text = " ".join(words[at : at + max(2, int(rng.expovariate(1 / mean_words)) % (4 * mean_words))])
            kind = rng.random()
            if kind < 0.05 and seen:
                text = rng.choice(seen)
            elif kind < 0.15:
                text = f"{rng.choice(prefixes)} {text}"
            texts.append(text)
        seen = texts[:1000]
        ids = [f"doc-{row}" for row in range(start, start + len(texts))]
        yield pa.record_batch({"id": ids, "text": texts})


def write_input(words: list[str], rows: int, mean_words: int, path: Path) -> None:
    """The input file."""
    with pq.ParquetWriter(path, pa.schema({"id": pa.string(), "text": pa.string()}), compression="zstd") as writer:
        for batch in batches(words, rows, mean_words):
            writer.write_batch(batch)


def plan(folder: Path, tokenizer: Path) -> dict[str, object]:
    """Plan the input in `folder`; the measured numbers."""
    spec = JobSpec.model_validate(
        {
            "name": "plan-benchmark",
            "model": "none",
            "input": {"path": str(folder / "input.parquet"), "id": "id"},
            "prompt": {"template": "Summarize:\n{{ text }}"},
            "sampling": {"max_tokens": 64, "temperature": 0},
            "output": {"path": str(folder / "run")},
        }
    )
    started, cpu = time.perf_counter(), time.process_time()
    with open_input(spec.input.path) as dataset:
        report = Planner(RunDir(folder / "run"), spec, dataset, Tokenizer.from_dir(tokenizer), 4096).plan()
    seconds = time.perf_counter() - started
    return {
        "rows": report.counters.rows,
        "prompt_tokens": report.counters.prompt_tokens,
        "shards": report.counters.shards,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "rows_per_second": round(report.counters.rows / seconds),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--words", type=int, default=45, help="mean words a row (about 2.3 tokens each)")
    parser.add_argument("--tokenizer", type=Path, help="a model directory instead of one trained here")
    parser.add_argument("--planned", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.planned:
        print(json.dumps(plan(options.planned, options.tokenizer)))
        return
    with tempfile.TemporaryDirectory(prefix="bulkrun-plan-") as name:
        folder, words = Path(name), corpus()
        if options.tokenizer is None:
            train_tokenizer(words, folder / "tokenizer")
        write_input(words, options.rows, options.words, folder / "input.parquet")
        # A process of its own, so that the peak is the planner's and not that of making the input.
        tokenizer = options.tokenizer or folder / "tokenizer"
        command = [sys.executable, "-m", "tests.benchmarks.plan_million_rows", "--planned", str(folder)]
        subprocess.run([*command, "--tokenizer", str(tokenizer)], check=True)


if __name__ == "__main__":
    main()
