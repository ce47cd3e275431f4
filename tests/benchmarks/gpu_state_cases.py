"""What `gpu_ops` measures of layers with a state: decoding, where each token reads and writes one, and prompts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tests.benchmarks.gpu_case import BYTES, Case, Sizes
from tests.benchmarks.state_ops import LAYERS, StateLayer, layer_ops, new_states
from tests.ops.linear_attention.steps import Part

_PROMPTS = 4


def state_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Bytes are those of states and of what each token has; prompts go token by token, which no ceiling knows."""
    length = max(sizes.prompts) // _PROMPTS
    steps = {
        f"decode S={sizes.decode_seqs}": [Part(row, 100, 1) for row in range(sizes.decode_seqs)],
        f"prefill {_PROMPTS}x{length}": [Part(row, 0, length) for row in range(_PROMPTS)],
    }
    for layer in LAYERS:
        for step, parts in steps.items():
            yield from _cases(layer, step, parts, device)


def _cases(layer: StateLayer, step: str, parts: list[Part], device: str) -> Iterator[Case]:
    state = new_states(layer, len(parts), device)
    num_bytes = {name: _bytes_of_tokens(layer, name, parts) for name in (layer.op, "causal_conv", "gated_rms_norm")}
    num_bytes[layer.op] += 2 * state.nbytes
    for name, run in layer_ops(layer, state, parts, torch.bfloat16).items():
        yield Case(f"states {step} {name} {layer.model}", run, num_bytes[name])


def _bytes_of_tokens(layer: StateLayer, name: str, parts: list[Part]) -> int:
    """Read and written, each number once."""
    inner, of_groups = layer.heads * layer.head_dim, layer.groups * layer.size
    per_token = {
        "causal_conv": 2 * (inner + (0 if layer.op == "selective_scan" else 2 * of_groups)),
        "gated_rms_norm": 3 * inner,
        "selective_scan": 4 * inner + 2 * of_groups,
        "state_space": 2 * inner + 2 * of_groups + layer.heads,
        "gated_delta_rule": 2 * inner + 2 * of_groups + (1 + layer.decays) * layer.heads,
    }
    return BYTES * per_token[name] * sum(part.count for part in parts)
