"""What a decode step costs beside the model's layers: where the engine's own time goes, by number of sequences.

    python -m tests.benchmarks.step_cost [--model DIR | --shape llama-20m] [--num-seqs 1 16 64 128] [--steps 200]

Every step is greedy decoding of all sequences. Prints one JSON object: for each number of sequences the median
microseconds of processor time that the engine's thread spends in each part of a step. `layers` and `head` are the
model's own; `beside` is all the rest, of which `schedule`, `inputs`, `rotary`, `sample` and `land` are the named parts.
The timers themselves are in there, with some tens of us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from bulkrun.launch.bench.engine import ModelChoice, load_for_bench
from bulkrun.launch.threads import bound_spinning
from bulkrun.request import Request, SamplingParams
from tests.benchmarks.machine import commit, machine

if TYPE_CHECKING:
    from bulkrun.engine.llm_engine import LLMEngine

PROMPT_LENGTH, WARM_UP_STEPS = 64, 5


def add_requests(engine: LLMEngine, num_seqs: int, num_tokens: int) -> None:
    """Requests whose prompts differ and fit into one step, each with so many output tokens."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    length = min(PROMPT_LENGTH, engine.config.max_num_batched_tokens // num_seqs)
    for number in range(num_seqs):
        engine.add_request(Request(str(number), [3 + (number + 7 * i) % 500 for i in range(length)], params))


@contextmanager
def timed(engine: LLMEngine, spent: Counter[str]) -> Iterator[None]:
    """Adds the processor seconds of each part of a step to `spent`."""
    from bulkrun.engine.step import model_runner

    runner = engine.model_runner
    parts: list[tuple[str, Any, str]] = [
        ("schedule", engine.scheduler, "schedule"),
        ("inputs", runner, "_model_input"),
        ("layers", runner, "_forward"),
        ("rotary", runner.model, "_rotaries"),
        ("sample", model_runner, "sample_tokens"),
        ("head", runner.model.lm_head, "forward"),
        ("land", engine, "_land"),
    ]
    with ExitStack() as patches:
        for part, owner, name in parts:
            patches.enter_context(mock.patch.object(owner, name, _timed(getattr(owner, name), part, spent)))
        yield


def _timed(function: Callable[..., Any], part: str, spent: Counter[str]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[part] += time.thread_time() - start

    return run


def measure(engine: LLMEngine, num_seqs: int, num_steps: int) -> dict[str, float]:
    """Median microseconds per step."""
    add_requests(engine, num_seqs, WARM_UP_STEPS + num_steps + 1)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    steps: list[Counter[str]] = []
    spent: Counter[str] = Counter()
    with timed(engine, spent):
        for _ in range(num_steps - 1):
            spent.clear()
            start = time.thread_time()
            engine.step()
            spent["step"] = time.thread_time() - start
            spent["beside"] = spent["step"] - spent["layers"] - spent["head"] + spent["rotary"]
            steps.append(Counter(spent))
    while engine.has_unfinished():
        engine.step()
    return {part: round(1e6 * statistics.median(step[part] for step in steps), 1) for part in sorted(steps[0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a directory or bundled:tiny, instead of a shape with random weights")
    parser.add_argument("--shape", default="llama-20m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    bound_spinning()  # before torch is loaded
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)
    settings = {"device": "cpu", "dtype": args.dtype, "kv_cache_memory_bytes": 2**29}
    choice = ModelChoice(args.model, None if args.model else args.shape, settings)
    loaded = load_for_bench(choice)
    costs = {num_seqs: measure(loaded.engine, num_seqs, args.steps) for num_seqs in args.num_seqs}
    result = {"benchmark": "step_cost", **loaded.facts, **choice.facts, "us_per_step": costs}
    print(json.dumps(result | {"machine": machine(), "commit": commit()}))


if __name__ == "__main__":
    main()
