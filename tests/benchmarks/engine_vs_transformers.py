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
import os
import platform
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bulkrun.launch.threads import settle_threads

settle_threads()  # before torch is loaded, as in a real run, and for both sides

import torch  # noqa: E402
import transformers  # noqa: E402

from bulkrun.engine.llm_engine import LLMEngine  # noqa: E402
from bulkrun.request import Request, SamplingParams  # noqa: E402

HISTORY = Path(__file__).with_name("history.jsonl")
VOCAB_SIZE = 8192


class Work(NamedTuple):
    """One request: its prompt and how many tokens it must generate."""

    prompt: list[int]
    num_output_tokens: int


def make_checkpoint(folder: Path) -> Path:
    """A random Llama, 20.1 million parameters, bf16 on disk; the same on every run."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # wide enough that the most likely token is clear
                parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_workload(count: int) -> list[Work]:
    """Lognormal lengths by quantiles, so that every size of the workload has the same shape; random tokens."""
    rng = random.Random(0)
    prompts = _lognormal(count, median=120, sigma=1.0, longest=1500, rng=rng)
    outputs = _lognormal(count, median=80, sigma=0.9, longest=600, rng=rng)
    return [
        Work([rng.randrange(3, VOCAB_SIZE) for _ in range(prompt)], output)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _lognormal(count: int, *, median: int, sigma: float, longest: int, rng: random.Random) -> list[int]:
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = [min(longest, max(4, round(median * math.exp(sigma * q)))) for q in quantiles]
    rng.shuffle(lengths)
    return lengths


def run_engine(engine: LLMEngine, work: Sequence[Work]) -> list[list[int]]:
    """Output tokens of every request, by continuous batching, longest output first."""
    for number in sorted(range(len(work)), key=lambda i: -work[i].num_output_tokens):
        params = SamplingParams(max_tokens=work[number].num_output_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(number), work[number].prompt, params))
    outputs: list[list[int]] = [[] for _ in work]
    while engine.has_unfinished():
        for completion in engine.step():
            outputs[int(completion.request_id)] = list(completion.token_ids)
    assert [len(output) for output in outputs] == [length for _, length in work]
    return outputs


@torch.inference_mode()
def run_transformers(model: transformers.PreTrainedModel, work: Sequence[Work], batch_size: int) -> list[list[int]]:
    """Output tokens of every request, by static batches of like output length; each runs to its longest."""
    outputs: list[list[int]] = [[] for _ in work]
    order = sorted(range(len(work)), key=lambda i: (work[i].num_output_tokens, len(work[i].prompt)))
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        width = max(len(work[i].prompt) for i in batch)
        length = max(work[i].num_output_tokens for i in batch)
        input_ids = torch.zeros(len(batch), width, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for row, i in enumerate(batch):
            input_ids[row, width - len(work[i].prompt) :] = torch.tensor(work[i].prompt)
            attention_mask[row, width - len(work[i].prompt) :] = 1
        generated = model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=length,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        for row, i in enumerate(batch):
            outputs[i] = generated[row, width : width + work[i].num_output_tokens].tolist()
    return outputs


def load_transformers(folder: Path, dtype: str) -> transformers.PreTrainedModel:
    """The checkpoint as transformers runs it."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def check_same_tokens(folder: Path, work: Sequence[Work]) -> None:
    """In float32 both must give the same tokens, or a speed means nothing."""
    few = sorted(work, key=lambda one: len(one.prompt))[:6]
    few = [Work(prompt, min(length, 24)) for prompt, length in few]
    expected = run_transformers(load_transformers(folder, "float32"), few, 1)
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
    few = [Work(one.prompt[:20], 3) for one in work[:4]]
    run_engine(engine, few)
    run_transformers(model, few, 4)
    ours: list[float] = []
    theirs: dict[int, list[float]] = {size: [] for size in batch_sizes}
    for _ in range(rounds):
        for size in batch_sizes:
            ours.append(timed(lambda: run_engine(engine, work)))
            theirs[size].append(timed(lambda size=size: run_transformers(model, work, size)))
            print(f"engine {ours[-1]:.1f} s, transformers (batch {size}) {theirs[size][-1]:.1f} s", file=sys.stderr)
        batch_sizes = [min(theirs, key=lambda size: statistics.median(theirs[size] or [math.inf]))]
    return ours, theirs


def machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next((line.split(":")[1].strip() for line in cpuinfo.splitlines() if "model name" in line), "unknown")
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "amx_bf16": "amx_bf16" in cpuinfo,
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


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
        folder = make_checkpoint(Path(temporary))
        check_same_tokens(folder, work)
        # runs repeat the same prompts: with the prefix cache on, the second run would find the first one's
        engine = LLMEngine.from_model_dir(folder, device="cpu", dtype=args.dtype, enable_prefix_caching=False)
        model = load_transformers(folder, args.dtype)
        before = machine()
        ours, theirs = measure(engine, model, work, args.batch_sizes, args.rounds)
    best = min(theirs, key=lambda size: statistics.median(theirs[size]))
    engine_s, transformers_s = statistics.median(ours), statistics.median(theirs[best])
    num_output_tokens = sum(one.num_output_tokens for one in work)
    result = {
        "benchmark": "engine_vs_transformers",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": _commit(),
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
        "prompt_tokens": sum(len(one.prompt) for one in work),
        "output_tokens": num_output_tokens,
        "max_num_seqs": engine.config.max_num_seqs,
        "max_num_batched_tokens": engine.config.max_num_batched_tokens,
        "machine": before,
    }
    print(json.dumps(result))
    if args.record:
        with HISTORY.open("a", encoding="utf-8") as history:
            history.write(json.dumps(result) + "\n")


def _commit() -> str:
    command = ["git", "-C", str(HISTORY.parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
