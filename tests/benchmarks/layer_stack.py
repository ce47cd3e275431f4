"""One step of a model on a CPU: all layers in one call beside op by op, in turns.

    OMP_NUM_THREADS=2 python -m tests.benchmarks.layer_stack MODEL_DIR [--tokens 1 16 64 256] [--dtype bfloat16]

Weights are random (config.json is enough); every token is a decoding sequence's with 150 tokens of context. Prints one
JSON line per number of tokens: medians and minima in microseconds, by the clock and by the processor's time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

from bulkrun.launch.threads import bound_spinning

bound_spinning()  # before torch is loaded, as in a real run

import torch  # noqa: E402

from bulkrun.models.decoder.decoder import Decoder  # noqa: E402
from bulkrun.models.kv_cache import KVCache  # noqa: E402
from bulkrun.models.recurrent_state import RecurrentState  # noqa: E402
from tests.models.load import load_model  # noqa: E402
from tests.models.paged_driver import make_metadata  # noqa: E402

CONTEXT, BLOCK_SIZE, ROUNDS = 150, 16, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    model = load_model(args.model, dtype=getattr(torch, args.dtype), device="cpu", load_format="dummy")
    assert isinstance(model, Decoder) and model.layer_stack is not None, "this model's layers are not compiled"
    ways = {"stack": model.layer_stack, "ops": None}
    for num_tokens in args.tokens:
        step, times = step_of(model, num_tokens), {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, model.layer_stack in ways.items():
                times[way].append(timed(step))
        print(json.dumps({"tokens": num_tokens, "threads": torch.get_num_threads(), **summary(times)}), flush=True)


def step_of(model: Decoder, num_tokens: int) -> Callable[[], object]:
    """A step of so many decoding sequences."""
    width = CONTEXT // BLOCK_SIZE + 1
    tables = [list(range(1 + seq * width, 1 + (seq + 1) * width)) for seq in range(num_tokens)]
    cache = KVCache.allocate(model.config, 1 + num_tokens * width, BLOCK_SIZE, model.dtype, "cpu")
    cache.states = RecurrentState.allocate(model.config, num_tokens, model.dtype, "cpu")
    states = [tensor for state in cache.states for tensor in state.tensors]
    for tensor in (*cache.k, *cache.v, *states):
        tensor.fill_(0.5)  # memory of its own: what nobody has written is one page of zeros, and always in the cache
    meta = make_metadata([(CONTEXT - 1, CONTEXT)] * num_tokens, tables, BLOCK_SIZE, num_tokens)
    input_ids, positions = torch.full((num_tokens,), 5), torch.full((num_tokens,), CONTEXT - 1)
    return lambda: model(input_ids, positions, cache, meta)


@torch.inference_mode()
def timed(step: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of one step: by the clock, of the process."""
    clock, cpu = time.perf_counter(), time.process_time()
    step()
    return 1e6 * (time.perf_counter() - clock), 1e6 * (time.process_time() - cpu)


def summary(times: dict[str, list[tuple[float, float]]]) -> dict[str, int]:
    """Median and minimum of each way."""
    found = {}
    for way, pairs in times.items():
        for name, values in zip(("wall", "cpu"), zip(*pairs, strict=True), strict=True):
            found[f"{way}_{name}_us"] = round(statistics.median(values))
            found[f"{way}_{name}_min_us"] = round(min(values))
    return found


if __name__ == "__main__":
    main()
