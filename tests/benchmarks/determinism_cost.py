"""What `engine.deterministic` costs: the same requests with and without it, in turns, in one process.

    python -m tests.benchmarks.determinism_cost [--shape llama-20m] [--dtype bfloat16] [--num-requests 64] [--rounds 3]

Prints one JSON object: for each round seconds of both (wall clock, and processor time of all threads), and the ratio of
their sums, deterministic to normal. On a machine with a GPU it runs there. Take `--threads 1` and the processor time on
a machine that others use too. The engines differ in nothing else; with `--input-len` and `--output-len` all requests
are alike, else lengths are heavy-tailed (medians 120 and 80).
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.workload import Lengths, Work, heavy_tailed_work, random_work
from bulkrun.request import Request, SamplingParams
from tests.benchmarks.machine import commit, machine


def run(engine: LLMEngine, work: list[Work]) -> tuple[float, float]:
    """Wall-clock and processor seconds for all the work."""
    for number, one in enumerate(work):
        params = SamplingParams(max_tokens=one.num_output_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(number), one.prompt_token_ids, params))
    wall, processor = time.perf_counter(), time.process_time()
    while engine.has_unfinished():
        engine.step()
    return time.perf_counter() - wall, time.process_time() - processor


def make_work(args: argparse.Namespace, loaded: LoadedModel) -> list[Work]:
    vocab_size = loaded.config.vocab_size
    if args.input_len:
        lengths = Lengths(args.input_len, args.input_len), Lengths(args.output_len, args.output_len)
        return random_work(args.num_requests, *lengths, shared_prefix=0, vocab_size=vocab_size)
    max_model_len = loaded.engine.config.max_model_len
    return heavy_tailed_work(args.num_requests, vocab_size=vocab_size, max_model_len=max_model_len)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"dtype": args.dtype, "max_num_seqs": args.max_num_seqs, "enable_prefix_caching": False}
    if not torch.cuda.is_available():
        settings["kv_cache_memory_bytes"] = args.kv_cache_gib * 2**30
    else:
        settings["gpu_memory_utilization"] = 0.45  # both are loaded at once
    model, shape = args.model, None if args.model else args.shape
    loaded = {
        name: load_for_bench(ModelChoice(model, shape, settings | {"deterministic": name == "deterministic"}))
        for name in ("normal", "deterministic")
    }
    work = make_work(args, loaded["normal"])
    for one in loaded.values():
        run(one.engine, work[: max(len(work) // 8, 1)])  # kernels are compiled, memory is touched
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in loaded}
    for _ in range(args.rounds):
        for name, one in loaded.items():
            times[name].append(run(one.engine, work))
    wall, processor = ({name: sum(t[kind] for t in own) for name, own in times.items()} for kind in (0, 1))
    return {
        "benchmark": "determinism_cost",
        **loaded["normal"].facts,
        "model": args.model or args.shape,
        "num_requests": len(work),
        "input_tokens": sum(len(one.prompt_token_ids) for one in work),
        "output_tokens": sum(one.num_output_tokens for one in work),
        "wall_s": {name: [round(t[0], 3) for t in own] for name, own in times.items()},
        "processor_s": {name: [round(t[1], 3) for t in own] for name, own in times.items()},
        "wall_ratio": round(wall["deterministic"] / wall["normal"], 3),
        "processor_ratio": round(processor["deterministic"] / processor["normal"], 3),
        "machine": machine(),
        "commit": commit(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory or bundled:tiny, instead of a shape with random weights")
    parser.add_argument("--shape", default="llama-20m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-requests", type=int, default=64)
    parser.add_argument("--input-len", type=int)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kv-cache-gib", type=int, default=1)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(json.dumps(compare(args)))


if __name__ == "__main__":
    main()
