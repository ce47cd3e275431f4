"""The ops of layers with a state on a CPU, beside what the memory gives: decoding sequences, and a prompt.

    OMP_NUM_THREADS=2 python -m tests.benchmarks.cpu_states [--dtype bfloat16]

Of Mamba 2's state space and Qwen3.5's gated delta rule at the sizes of models: the best of some rounds in microseconds
a token, and GB/s of the state as if each token read and wrote it (those of a prompt find it in a cache). Beside them,
in the same run, the convolution and the norm of the same layer, and a pass that halves all states in place. Prints one
JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial

from bulkrun.launch.threads import bound_spinning

bound_spinning()  # before torch is loaded, as in a real run

import torch  # noqa: E402

from bulkrun import ops  # noqa: E402
from tests.benchmarks.machine import machine  # noqa: E402
from tests.ops.linear_attention.steps import Part, make_meta, num_tokens  # noqa: E402

SPACES = ((48, 64, 128, 1), (32, 128, 256, 2), (128, 64, 16, 8))  # heads, their dimensions, rows of a state, groups
RULE = (32, 128, 128, 16)  # heads, their dimensions, a key's, key heads
STEPS = {"decode": [Part(row, 100, 1) for row in range(64)], "prompt": [Part(0, 0, 512)]}
TAPS, ROUNDS = 4, 15
Op = Callable[[], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    print(json.dumps({"machine": machine(), "threads": torch.get_num_threads(), "dtype": args.dtype}))
    for step, parts in STEPS.items():
        for sizes, is_rule in (*((sizes, False) for sizes in SPACES), (RULE, True)):
            for result in measure(sizes, is_rule, parts, getattr(torch, args.dtype)):
                print(json.dumps({"step": step, "sizes": sizes} | result))


def measure(
    sizes: tuple[int, int, int, int], is_rule: bool, parts: list[Part], dtype: torch.dtype
) -> Iterator[dict[str, object]]:
    """Each op of a layer."""
    num_heads, head_dim, size, num_groups = sizes
    state = torch.randn(len(parts), num_heads, size, head_dim)
    layer = layer_ops(state, num_groups, is_rule, parts, dtype)
    for name, op in (*layer.items(), ("halve_states", partial(state.mul_, 0.5))):
        taken, of_tokens = min(seconds(op) for _ in range(ROUNDS)), num_tokens(parts)
        result = {"op": name, "us_per_token": round(1e6 * taken / of_tokens, 1)}
        if name in ("state_space", "gated_delta_rule", "halve_states"):
            moved = 2 * state[0].numel() * state.element_size() * (len(parts) if name == "halve_states" else of_tokens)
            result["gb_s"] = round(moved / taken / 1e9, 1)
        yield result


def layer_ops(
    state: torch.Tensor, num_groups: int, is_rule: bool, parts: list[Part], dtype: torch.dtype
) -> dict[str, Op]:
    """By name, over random numbers."""
    num_seqs, num_heads, size, head_dim = state.shape
    total, meta, (a_log_H, dt_bias_H, d_H) = num_tokens(parts), make_meta(parts), torch.randn(3, num_heads)
    x_TC = torch.randn(total, num_heads * head_dim + 2 * num_groups * size).to(dtype)
    dt_TH, taps = torch.randn(total, 2 * num_heads).to(dtype), torch.randn(TAPS, x_TC.shape[1]).to(dtype)
    heads_THP = torch.randn(total, num_heads, head_dim).to(dtype)
    before = torch.zeros(num_seqs, TAPS - 1, x_TC.shape[1], dtype=dtype)
    layer: dict[str, Op] = {"causal_conv": partial(ops.causal_conv, x_TC, taps, None, before, meta, silu=True)}
    if is_rule:
        layer["gated_delta_rule"] = partial(ops.gated_delta_rule, x_TC, dt_TH, a_log_H, dt_bias_H, state, meta)
    else:
        rates = a_log_H, dt_bias_H, d_H
        layer["state_space"] = partial(ops.state_space, x_TC, dt_TH[:, :num_heads], *rates, state, meta)
    groups = heads_THP if is_rule else heads_THP.view(total, num_groups, -1)
    layer["gated_rms_norm"] = partial(
        ops.gated_rms_norm, groups, groups, groups[0, 0].clone(), 1e-6, norm_before_gate=is_rule
    )
    return layer


def seconds(op: Op) -> float:
    """Of one call, by the clock."""
    start = time.perf_counter()
    op()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
