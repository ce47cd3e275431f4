"""CPU throughput: the engine beside transformers' static `generate`, same checkpoint, same workload, one process.

    python -m tests.benchmarks.engine_vs_transformers [--requests 256] [--dtype bfloat16] [--rounds 3] [--record]

The checkpoint is a seeded random Llama of about 20 million parameters. Lengths are heavy-tailed: prompts lognormal
with median 120 (at most 1500), outputs with median 80 (at most 600), end-of-sequence ignored, greedy. Both sides are
told each output's length, which a real job would have to guess: transformers batches requests of like length (left
padding, sdpa attention; several batch sizes are tried and the best one counts), the engine starts the longest first.
Before anything is timed, both must give the same tokens in float32.

Runs take turns (engine, transformers, engine, ...); the result is the ratio of the medians. Prints one JSON line;
`--record` appends it to tests/benchmarks/history.jsonl. On a busy machine only the ratio means anything.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bulkrun.launch.threads import bound_spinning

bound_spinning()  # before torch is loaded, as in a real run, and for both sides

import torch  # noqa: E402
import transformers  # noqa: E402

from bulkrun.engine.llm_engine import LLMEngine  # noqa: E402
from tests.benchmarks.checkpoints import write_checkpoint  # noqa: E402
from tests.benchmarks.cpu_peers.peer_bulkrun import run_engine  # noqa: E402
from tests.benchmarks.machine import commit, machine, record  # noqa: E402
from tests.benchmarks.static_generate import load_transformers, run_static  # noqa: E402
from tests.benchmarks.work import Work, lognormal_lengths  # noqa: E402

VOCAB_SIZE = 8192


def make_workload(count: int) -> list[Work]:
    """Heavy-tailed lengths, random tokens."""
    rng = random.Random(0)
    prompts = lognormal_lengths(count, median=120, sigma=1.0, longest=1500, rng=rng)
    outputs = lognormal_lengths(count, median=80, sigma=0.9, longest=600, rng=rng)
    return [
        Work([rng.randrange(3, VOCAB_SIZE) for _ in range(prompt)], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def check_same_tokens(folder: Path, work: Sequence[Work]) -> None:
    """In float32 both must give the same tokens, or a speed means nothing."""
    few = sorted(work, key=lambda one: len(one.prompt_token_ids))[:6]
    few = [Work(prompt, min(length, 24)) for prompt, length in few]
    expected = run_static(load_transformers(folder, "float32"), few, 1)
    got = run_engine(LLMEngine.from_model_dir(folder, device="cpu", dtype="float32"), few)
    if got != expected:
        sys.exit("engine and transformers give different tokens in float32: no benchmark on wrong results")


def timed(function: Callable[[], object]) -> float:
    """Seconds one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(
    engine: LLMEngine,
    model: transformers.PreTrainedModel,
    work: Sequence[Work],
    batch_sizes: Sequence[int],
    rounds: int,
) -> tuple[list[float], dict[int, list[float]]]:
    """Seconds of each run, in turns. After the first round only the best batch size of transformers goes on."""
    few = [Work(one.prompt_token_ids[:20], 3) for one in work[:4]]
    run_engine(engine, few)
    run_static(model, few, 4)
    ours: list[float] = []
    theirs: dict[int, list[float]] = {size: [] for size in batch_sizes}
    for _ in range(rounds):
        for size in batch_sizes:
            ours.append(timed(lambda: run_engine(engine, work)))
            theirs[size].append(timed(lambda size=size: run_static(model, work, size)))
            print(f"engine {ours[-1]:.1f} s, transformers (batch {size}) {theirs[size][-1]:.1f} s", file=sys.stderr)
        batch_sizes = [min(theirs, key=lambda size: statistics.median(theirs[size] or [math.inf]))]
    return ours, theirs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--record", action="store_true", help="append the result to history.jsonl")
    args = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    work = make_workload(args.requests)
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_checkpoint("llama-20m", Path(temporary))
        check_same_tokens(folder, work)
        # runs repeat the same prompts: with the prefix cache on, the second run would find the first one's
        engine = LLMEngine.from_model_dir(folder, device="cpu", dtype=args.dtype, enable_prefix_caching=False)
        model = load_transformers(folder, args.dtype)
        before = machine() | {"threads": torch.get_num_threads()}
        ours, theirs = measure(engine, model, work, args.batch_sizes, args.rounds)
    best = min(theirs, key=lambda size: statistics.median(theirs[size]))
    engine_s, transformers_s = statistics.median(ours), statistics.median(theirs[best])
    num_output_tokens = sum(one.num_output_tokens for one in work)
    result = {
        "benchmark": "engine_vs_transformers",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": f"python -m tests.benchmarks.engine_vs_transformers {shlex.join(sys.argv[1:])}".strip(),
        "ratio": round(transformers_s / engine_s, 2),
        "engine_s": [round(seconds, 2) for seconds in ours],
        "transformers_s": {str(size): [round(s, 2) for s in seconds] for size, seconds in theirs.items()},
        "best_batch_size": best,
        "engine_output_tokens_per_s": round(num_output_tokens / engine_s, 1),
        "transformers_output_tokens_per_s": round(num_output_tokens / transformers_s, 1),
        "model": "random Llama, 20.1M parameters",
        "dtype": args.dtype,
        "requests": args.requests,
        "prompt_tokens": sum(len(one.prompt_token_ids) for one in work),
        "output_tokens": num_output_tokens,
        "max_num_seqs": engine.config.max_num_seqs,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "machine": before,
    }
    print(json.dumps(result))
    if args.record:
        record(result)


if __name__ == "__main__":
    main()
