"""The ops of layers with a state on a CPU, beside what the memory gives: decoding sequences, and a prompt.

    OMP_NUM_THREADS=2 python -m tests.benchmarks.cpu_states [--dtype bfloat16]

Of Mamba's selective scan, Mamba 2's state space and the gated delta rule at the sizes of models (`state_ops.LAYERS`):
the best of some rounds in microseconds a token, and GB/s of the state as if each token read and wrote it (those of a
prompt find it in a cache). Beside them, in the same run, the convolution and the norm of the same layer, and a pass
that halves all states in place. Prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from functools import partial

from bulkrun.launch.threads import bound_spinning

bound_spinning()  # before torch is loaded, as in a real run

import torch  # noqa: E402

from tests.benchmarks.machine import machine  # noqa: E402
from tests.benchmarks.state_ops import LAYERS, Op, StateLayer, layer_ops, new_states  # noqa: E402
from tests.ops.linear_attention.steps import Part, num_tokens  # noqa: E402

STEPS = {"decode": [Part(row, 100, 1) for row in range(64)], "prompt": [Part(0, 0, 512)]}
ROUNDS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    print(json.dumps({"machine": machine(), "threads": torch.get_num_threads(), "dtype": args.dtype}))
    for step, parts in STEPS.items():
        for layer in LAYERS:
            for result in measure(layer, parts, getattr(torch, args.dtype)):
                print(json.dumps({"step": step, "model": layer.model} | result))


def measure(layer: StateLayer, parts: list[Part], dtype: torch.dtype) -> Iterator[dict[str, object]]:
    """Each op of a layer."""
    state = new_states(layer, len(parts), "cpu")
    run = layer_ops(layer, state, parts, dtype) | {"halve_states": partial(state.mul_, 0.5)}
    for name, op in run.items():
        taken, of_tokens = min(seconds(op) for _ in range(ROUNDS)), num_tokens(parts)
        result = {"op": name, "us_per_token": round(1e6 * taken / of_tokens, 1)}
        if name in (layer.op, "halve_states"):
            moved = 2 * state[0].nbytes * (len(parts) if name == "halve_states" else of_tokens)
            result["gb_s"] = round(moved / taken / 1e9, 1)
        yield result


def seconds(op: Op) -> float:
    """Of one call, by the clock."""
    start = time.perf_counter()
    op()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
