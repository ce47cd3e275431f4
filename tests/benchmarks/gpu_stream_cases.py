"""What `gpu_ops` measures of Gemma 3n: ops of several residual streams, and of gates of which few are open."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from bulkrun import ops
from tests.benchmarks.gpu_case import BYTES, Case, Sizes

_STREAMS = 4


def stream_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """All memory: bytes are those of each number that is read or written, once."""
    tokens, width = sizes.num_tokens, sizes.hidden_size // 2  # as wide as Gemma 3n
    streams = torch.randn(_STREAMS, tokens, width, device=device, dtype=torch.bfloat16)
    modes = torch.rand(tokens, _STREAMS, device=device, dtype=torch.bfloat16)
    weight = torch.randn(_STREAMS**2, _STREAMS, device=device, dtype=torch.bfloat16)
    of_stream = BYTES * tokens * width
    yield _case("with_rms_of", ops.with_rms_of, (streams[1:], streams[0], 1e-5), (2 * _STREAMS - 1) * of_stream)
    yield _case("predict_streams", ops.predict_streams, (streams, modes, weight), 2 * _STREAMS * of_stream)
    corrected = (streams, streams[0].clone(), modes, weight[:_STREAMS])
    yield _case("correct_streams", ops.correct_streams, corrected, (2 * _STREAMS + 1) * of_stream)
    gate_up = torch.randn(tokens, 2 * sizes.intermediate_size, device=device, dtype=torch.bfloat16)
    gates = gate_up[:, : sizes.intermediate_size]
    yield _case("cut_gates_", ops.cut_gates_, (gates, 1.6), 2 * BYTES * gates.numel())


def _case(name: str, op: Callable[..., object], args: tuple[object, ...], num_bytes: float) -> Case:
    reference: Callable[..., object] = op.__wrapped__  # type: ignore[attr-defined]
    return Case(f"streams {name}", lambda: op(*args), num_bytes, rival=lambda: reference(*args))
