"""The inputs of a step, written down by hand token by token, for the reference and the kernel; stale buffers too."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.cpu.step_inputs import append_tokens as compiled_append_tokens
from bulkrun.ops.cpu.step_inputs import step_inputs as compiled_step_inputs
from bulkrun.ops.step_inputs import StepBuffers, append_tokens, step_inputs
from bulkrun.ops.triton import step_inputs as triton_module
from bulkrun.ops.triton.step_inputs import step_inputs as triton_step_inputs

needs_compiled = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
COMPILED = pytest.param(compiled_step_inputs, marks=needs_compiled)
OPS = pytest.mark.parametrize(
    "op", [step_inputs, triton_step_inputs, COMPILED], ids=["reference", "triton", "compiled"]
)
NUM_ROWS, LENGTH = 6, 40


def device_of(op: object) -> torch.device:
    return torch.device("cuda" if op is triton_step_inputs and torch.cuda.is_available() else "cpu")


def check(
    op: object, chunks: list[tuple[int, int, int]], block_size: int, padding: tuple[int, int], seed: int = 0
) -> None:
    """chunks: (row, start, count) of each sequence; padding: tokens and sequences more than there are."""
    rng, device = random.Random(seed), device_of(op)
    tokens = [[rng.randrange(1, 99) for _ in range(LENGTH)] for _ in range(NUM_ROWS)]
    width = -(-LENGTH // block_size)
    tables = [[rng.randrange(1, 77) for _ in range(width)] for _ in range(NUM_ROWS)]
    num_tokens, num_seqs = sum(c for _, _, c in chunks), len(chunks)
    everything = StepBuffers.allocate(num_tokens + padding[0] + 3, num_seqs + padding[1] + 2, width, device)
    for name in everything.__slots__:
        getattr(everything, name).fill_(-7)  # of a larger step before
    out = everything.first(num_tokens + padding[0], num_seqs + padding[1])
    padded = chunks + [(0, 0, 0)] * padding[1]
    packed = torch.tensor(padded, dtype=torch.int64, device=device).reshape(-1, 3).t().contiguous()
    as_rows = (torch.tensor(rows, dtype=torch.int32, device=device) for rows in (tokens, tables))
    op(*as_rows, packed, out, block_size=block_size)  # type: ignore[operator]

    spans = [(row, position) for row, start, count in chunks for position in range(start, start + count)]
    assert out.input_ids_T.tolist() == [tokens[row][p] for row, p in spans] + [0] * padding[0]
    assert out.positions_T.tolist() == [p for _, p in spans] + [0] * padding[0]
    slots = out.slot_mapping_T.tolist()
    assert slots[:num_tokens] == [tables[row][p // block_size] * block_size + p % block_size for row, p in spans]
    assert all(0 <= slot < block_size for slot in slots[num_tokens:])
    assert out.context_lens_S.tolist() == [start + count if count else 0 for _, start, count in padded]
    ends = [sum(c for _, _, c in padded[:n]) for n in range(len(padded) + 1)]
    assert out.cu_seqlens_q.tolist() == ends
    for got, (row, start, count) in zip(out.block_tables_SM.tolist(), padded, strict=True):
        used = -(-(start + count) // block_size) if count else 0
        assert got[:used] == tables[row][:used]
    assert out.rows_S.tolist() == [row for row, *_ in padded]
    assert (everything.input_ids_T[num_tokens + padding[0] :] == -7).all()
    assert (everything.context_lens_S[num_seqs + padding[1] :] == -7).all()


@OPS
def test_decode_and_chunks_without_padding(op: object) -> None:
    check(op, [(3, 7, 1), (0, 39, 1), (5, 0, 1), (1, 4, 13), (2, 0, 40)], 4, (0, 0))


@OPS
def test_padding_and_sequences_in_the_middle_that_compute_nothing(op: object) -> None:
    """Between decode sequences and chunks a padded step has sequences without tokens."""
    check(op, [(3, 7, 1), (0, 0, 0), (0, 0, 0), (1, 5, 6), (4, 0, 0)], 16, (9, 3))


@OPS
def test_nothing_but_padding(op: object) -> None:
    check(op, [], 4, (5, 2))


@pytest.mark.parametrize(
    "op", [append_tokens, pytest.param(compiled_append_tokens, marks=needs_compiled)], ids=["reference", "compiled"]
)
def test_appended_tokens_stand_in_their_rows_and_nowhere_else(op: object) -> None:
    token_ids_RL = torch.full((NUM_ROWS, LENGTH), -7, dtype=torch.int32)
    places = {(3, 0): 11, (0, 39): 2**31 - 1, (5, 7): 0}
    rows, positions = zip(*places, strict=True)
    op(token_ids_RL, *(torch.tensor(values) for values in (rows, positions, list(places.values()))))  # type: ignore[operator]
    expected = [[places.get((row, position), -7) for position in range(LENGTH)] for row in range(NUM_ROWS)]
    assert token_ids_RL.tolist() == expected


@settings(max_examples=25)
@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=NUM_ROWS),
    block_size=st.sampled_from([1, 4, 16]),
    padding=st.tuples(st.integers(0, 20), st.integers(0, 4)),
    seed=st.integers(0, 99),
)
@OPS
def test_any_mix(op: object, counts: list[int], block_size: int, padding: tuple[int, int], seed: int) -> None:
    rng = random.Random(seed)
    rows = rng.sample(range(NUM_ROWS), len(counts))
    check(op, [(row, rng.randrange(LENGTH - c), c) for row, c in zip(rows, counts, strict=True)],
          block_size, padding, seed)  # fmt: skip


@OPS
def test_more_sequences_blocks_and_tokens_than_a_tile(op: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_module, "_TILE", 64)
    device = device_of(op)
    length, num_seqs = 180, 70
    tokens_RL = torch.arange(2 * length, dtype=torch.int32, device=device).view(2, length)
    blocks_RM = torch.arange(1, 2 * length + 1, dtype=torch.int32, device=device).view(2, length)
    chunks = [(0, 5, 1)] * (num_seqs - 1) + [(1, 30, 130)]
    out = StepBuffers.allocate(num_seqs - 1 + 130, num_seqs, length, device)
    packed = torch.tensor(chunks, device=device).t().contiguous()
    op(tokens_RL, blocks_RM, packed, out, block_size=1)  # type: ignore[operator]
    assert out.cu_seqlens_q[-3:].tolist() == [68, 69, 69 + 130]
    assert torch.equal(out.input_ids_T[69:], tokens_RL[1, 30:160])
    assert torch.equal(out.slot_mapping_T[69:], blocks_RM[1, 30:160].long())
    assert torch.equal(out.block_tables_SM[-1, :160], blocks_RM[1, :160])
