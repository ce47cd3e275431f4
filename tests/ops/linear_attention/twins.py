"""What the tests of linear attention share: an op's twins, where each runs, how exact it is, and what all keep to."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from bulkrun.ops.cpu.library import library
from tests.ops.linear_attention.steps import DECODE, MIXED, NUM_ROWS, Part, make_meta, num_tokens

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
STEPS = {"mixed": MIXED, "decode": DECODE}
GPU = "cuda" if torch.cuda.is_available() else "cpu"
ERRORS = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
NUM_PADDING = 3  # tokens of nobody behind a step's
FORGETS = Part(2, 1, 48)
RATE = 16.0  # of what forgets
BESIDE, IN_PIECES = Part(5, 9, 3), Part(2, 0, 37)


def twins(module: object, name: str) -> list[object]:
    """The C++ one, where there is a compiler, and the kernel."""
    skip = pytest.mark.skipif(library() is None, reason="no compiled ops")
    of_cpu, of_gpu = module  # type: ignore[misc]
    return [
        pytest.param(getattr(of_cpu, name), marks=skip, id="compiled"),
        pytest.param(getattr(of_gpu, name), id="triton"),
    ]


def device_of(op: Callable[..., object], dtype: torch.dtype) -> str:
    """Where an op runs; skips what the interpreter has wrong."""
    if not op.__module__.startswith("bulkrun.ops.triton"):
        return "cpu"
    if GPU == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter is wrong for bf16")
    return GPU


def assert_as_reference(
    op: Callable[..., torch.Tensor],
    reference: Callable[..., torch.Tensor],
    inputs: list[torch.Tensor],
    parts: list[Part],
) -> None:
    """An op does to `inputs`, behind which `NUM_PADDING` tokens stand, and states, the last, what its reference does.

    Where sequences begin it is as if there were zeros, whatever is there; rows of no sequence stay as they are.
    """
    state, device, error = inputs[-1], inputs[0].device, ERRORS[inputs[0].dtype]
    state[[part.row for part in parts if part.count and not part.before]] = float("nan")
    meta, before, expected_state = make_meta(parts, device, num_padding=NUM_PADDING), state.clone(), state.clone()
    out = op(*inputs, meta)
    expected = reference(*inputs[:-1], expected_state, meta)
    torch.testing.assert_close(out, expected, atol=error, rtol=error)
    torch.testing.assert_close(state, expected_state, atol=2e-5, rtol=2e-5)
    untouched = [row for row in range(NUM_ROWS) if row not in {part.row for part in parts if part.count}]
    assert torch.equal(state[untouched], before[untouched])
    assert not out[-NUM_PADDING:].any(), "tokens that pad the step"


def assert_is_reference(
    op: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    """A compiled op hands inputs that it is not made for on: the reference's bits, of states, the last, too."""
    if library() is None:
        pytest.skip("no compiled ops")
    meta, states = make_meta(STEPS["mixed"]), [inputs[-1].clone(), inputs[-1].clone()]
    ours = op(*inputs[:-1], states[0], meta)
    assert torch.equal(ours, reference(*inputs[:-1], states[1], meta))
    assert torch.equal(*states)


def assert_forgets(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor], dt: float) -> None:
    """States, the last of `inputs`, forget in the tokens of `FORGETS`, which write nothing, by `RATE` and steps of dt.

    Each token's factor and its product are rounded: together by 2^-23 at most. Beside that a GPU's exponential may be
    off by 2^-22 where a token forgets a thousandth, which is all that the relative part is for.
    """
    state, meta = inputs[-1], make_meta([FORGETS], inputs[0].device)
    before = state[FORGETS.row].clone()
    op(*inputs, meta)
    forgotten = 1 - (state[FORGETS.row].double() / before.double())
    expected = 1 - math.exp(-RATE * FORGETS.count * math.log1p(math.exp(dt)))
    bound = FORGETS.count * 2**-23
    torch.testing.assert_close(forgotten, torch.full_like(forgotten, expected), rtol=2e-4, atol=bound)


def assert_same_bits_in_pieces(op: Callable[..., torch.Tensor], inputs: list[torch.Tensor], num_of_tokens: int) -> None:
    """The tokens of `IN_PIECES`, which `inputs` has behind those of `BESIDE`, give the same bits however they come.

    The first `num_of_tokens` inputs have a row for each token; the last are states.
    """
    of_tokens, others, state = inputs[:num_of_tokens], inputs[num_of_tokens:-1], inputs[-1]

    def run(pieces: list[int], beside: list[Part]) -> tuple[torch.Tensor, torch.Tensor]:
        states, outs, first = state.clone(), [], 0
        before = torch.arange(num_tokens(beside))
        for piece in pieces:
            at = torch.cat([before, BESIDE.count + first + torch.arange(piece)])
            meta = make_meta([*beside, Part(IN_PIECES.row, first, piece)])
            outs.append(op(*[one[at] for one in of_tokens], *others, states, meta)[len(before) :])
            first += piece
        return torch.cat(outs), states[IN_PIECES.row]

    whole = run([IN_PIECES.count], [])
    for pieces, beside in (([1, 1, 16, 1, 7, 11], []), ([20, 17], [BESIDE])):
        out, last = run(pieces, beside)
        assert torch.equal(out, whole[0]) and torch.equal(last, whole[1])
