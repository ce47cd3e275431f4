"""What planning and running cost around the model: memory and time on a synthetic input of short rows.

    python -m tests.benchmarks.million_rows [--rows 1000000] [--words 45] [--rows-per-file N]

Rows are words drawn from the standard library's source (about 2.3 tokens a word), a tenth of them behind one of 50
shared prefixes, and a twentieth repeat an earlier row; the tokenizer is trained on the same text. The runner gets an
engine that answers at once, so everything but the model is measured: reading shards, feeding, decoding, journaling,
committing, finishing. Planner and runner each are a process of their own. Prints one JSON line for each. With one row a
file and twice the rows, a cost that grows with the number of shards is seen.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from bulkrun.data.inputs.reader import open_input
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import open_run
from bulkrun.job.store.run_record import new_record, read_record
from bulkrun.job.views.verify import verify_run
from bulkrun.request import Completion, EngineStats, PartialOutput, Request
from bulkrun.text.tokenizer import Tokenizer
from tests.job.plan.planning import make_planner
from tests.job.small_runs import make_runner

OUTPUT_TOKENS = 32
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


class InstantEngine:
    """Answers each request in the step after it was added, with the first tokens of its prompt."""

    max_model_len, max_num_seqs = 4096, 512

    def __init__(self) -> None:
        self._waiting: deque[Request] = deque()
        self._steps = 0

    def add_request(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        self._steps += 1
        ended = [self._waiting.popleft() for _ in range(min(self.max_num_seqs, len(self._waiting)))]
        return [self._completion(request) for request in ended]

    def _completion(self, request: Request) -> Completion:
        tokens = tuple(request.prompt_token_ids[:OUTPUT_TOKENS])
        size = len(request.prompt_token_ids)
        return Completion(request.request_id, tokens, "stop", num_prompt_tokens=size, num_output_tokens=len(tokens))

    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def abort(self, request_ids: Sequence[str]) -> None:
        self._waiting = deque(request for request in self._waiting if request.request_id not in set(request_ids))

    def partial_outputs(self) -> list[PartialOutput]:
        return []

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=len(self._waiting), num_steps=self._steps)


def peak_rss_kib() -> int:
    """Of this process since it was started (`ru_maxrss` of a child begins with its parent's)."""
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def measured(work: str, started: float, cpu: float, **facts: object) -> str:
    return json.dumps(
        {
            "work": work,
            **facts,
            "seconds": round(time.perf_counter() - started, 1),
            "cpu_seconds": round(time.process_time() - cpu, 1),
            "peak_rss_mb": peak_rss_kib() // 1024,
            "cores": os.cpu_count(),
            "machine": platform.machine(),
            "python": platform.python_version(),
            "pyarrow": pa.__version__,
        }
    )


def job(folder: Path, rows_per_file: int | None = None) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "million",
            "model": "none",
            "input": {"path": str(folder / "input.parquet"), "id": "id"},
            "prompt": {"template": "Summarize:\n{{ text }}"},
            "sampling": {"max_tokens": 64, "temperature": 0},
            "output": {"path": str(folder / "run"), "rows_per_file": rows_per_file},
        }
    )


def plan(folder: Path, rows_per_file: int | None = None) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    spec, run = job(folder, rows_per_file), RunDir(folder / "run")
    open_run(run, new_record(spec.model_dump(mode="json"), input_facts={}, model_facts={}, versions={}))
    with open_input(spec.input.path) as dataset:
        report = make_planner(run, spec, dataset, Tokenizer.from_dir(folder / "tokenizer"), 4096).plan()
    counters = report.counters
    print(measured("plan", started, cpu, rows=counters.rows, prompt_tokens=counters.prompt_tokens))


def work(folder: Path, rows_per_file: int | None) -> None:
    started, cpu = time.perf_counter(), time.process_time()
    run, tokenizer = RunDir(folder / "run"), Tokenizer.from_dir(folder / "tokenizer")
    spec = job(folder, rows_per_file)
    runner = make_runner(run, read_record(run), spec, InstantEngine(), decode=tokenizer.decode_batch)
    outcome = runner.run()
    assert outcome.totals is not None
    print(measured("run", started, cpu, rows=outcome.totals.rows, parts=outcome.totals.parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--words", type=int, default=45, help="mean words a row (about 2.3 tokens each)")
    parser.add_argument("--rows-per-file", type=int, help="default: as a job has it")
    parser.add_argument("--phase", choices=("plan", "run"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.phase:
        return {"plan": plan, "run": work}[options.phase](options.folder, options.rows_per_file)
    with tempfile.TemporaryDirectory(prefix="bulkrun-million-") as name:
        folder, words = Path(name), corpus()
        train_tokenizer(words, folder / "tokenizer")
        write_input(words, options.rows, options.words, folder / "input.parquet")
        for phase in ("plan", "run"):
            command = [sys.executable, "-m", "tests.benchmarks.million_rows", "--folder", str(folder)]
            command += ["--rows-per-file", str(options.rows_per_file)] if options.rows_per_file else []
            subprocess.run([*command, "--phase", phase], check=True)
        report = verify_run(RunDir(folder / "run"))
        assert report.ok, report.problems
        assert report.rows == options.rows


if __name__ == "__main__":
    main()
