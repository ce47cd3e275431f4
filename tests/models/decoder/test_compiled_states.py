"""Layers that keep a state, in the one compiled call: whose state it is, and what of a step counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.recurrent_state import RecurrentState
from bulkrun.ops import AttentionMetadata
from bulkrun.ops.cpu.layer_stack import LayerStack
from bulkrun.ops.cpu.library import compiled_ops
from tests.models.decoder.test_compiled_layers import DTYPES, TOLERANCE_OF_STATES, load, op_by_op, random_tokens
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits, make_metadata
from tests.models.tiny_models import save_tiny_model

pytestmark = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")
BLOCK_SIZE, ROWS = 8, [5, 0, 3]
LFM2 = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "block_auto_adjust_ff_dim": False}
VARIANTS = {
    "qwen3_5": {"rms_norm_eps": 1e-2}, "lfm2_biases": LFM2, "granite_h": {}, "jamba_dense": {},
    "mamba_whole_panels": {}, "falcon_mamba": {}, "mamba2": {}, "nemotron_h_whole": {},
}  # fmt: skip
CHUNKS = [(13, 14), (0, 9), (4, 26)]  # of three sequences: one decodes, one begins, one goes on with its prompt


def stacked(tmp_path: Path, variant: str, dtype: torch.dtype) -> Decoder:
    model = load(tmp_path, variant, dtype, **VARIANTS[variant])
    assert isinstance(model.layer_stack, LayerStack)
    return model


def step(
    model: Decoder, meta: AttentionMetadata, tokens: torch.Tensor, kept: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[RecurrentState]]:
    """Hidden states of a step over caches and states of random numbers, and the states afterwards."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache.allocate(model.config, 12, BLOCK_SIZE, model.dtype, "cpu")
    cache.states = RecurrentState.allocate(model.config, 7, model.dtype, "cpu")
    for tensor in (*cache.k, *cache.v, *tensors_of(cache.states)):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    positions = torch.cat([torch.arange(*chunk) for chunk in CHUNKS])
    positions = torch.cat((positions, torch.zeros(len(tokens) - len(positions), dtype=torch.int64)))
    with torch.inference_mode():
        return model(tokens, positions, cache, meta, kept), cache.states


def tensors_of(states: list[RecurrentState]) -> list[torch.Tensor]:
    return [tensor for state in states for tensor in state.tensors]


def metadata() -> AttentionMetadata:
    return make_metadata(CHUNKS, [[1, 2], [3, 4], [5, 6, 7, 8]], BLOCK_SIZE, num_decode_seqs=1, rows=ROWS)


TOKENS = torch.tensor(random_tokens(sum(end - start for start, end in CHUNKS), seed=3))


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_states_are_those_of_op_by_op_and_other_rows_stay(
    variant: str, num_threads: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    model, before = stacked(tmp_path, variant, dtype), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    ours, states = step(model, metadata(), TOKENS)
    torch.set_num_threads(before)
    with op_by_op(model):
        reference, their_states = step(model, metadata(), TOKENS)
    others = [row for row in range(7) if row not in ROWS]
    tolerance = TOLERANCE_OF_STATES[dtype]
    torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance)
    for one, other in zip(tensors_of(states), tensors_of(their_states), strict=True):
        torch.testing.assert_close(one, other, atol=tolerance, rtol=tolerance)
        assert torch.equal(one[others], other[others])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [[0, 9, 31], [4], [], list(range(32))], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_of_few_tokens_come_the_same_bits_and_all_states(
    variant: str, kept: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """The last layer is one with a state, of which no token may be left out."""
    model = stacked(tmp_path, variant, dtype)
    every, states = step(model, metadata(), TOKENS)
    some, same_states = step(model, metadata(), TOKENS, torch.tensor(kept, dtype=torch.int64))
    assert torch.equal(some, every[kept])
    assert all(map(torch.equal, tensors_of(states), tensors_of(same_states)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_pads_a_step_changes_nothing(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tokens of nobody, and sequences without any."""
    model, meta = stacked(tmp_path, variant, dtype), metadata()
    padded = replace(
        meta,
        slot_mapping_T=torch.cat((meta.slot_mapping_T, torch.full((5,), -1))),
        block_tables_SM=torch.cat((meta.block_tables_SM, torch.zeros(2, 4, dtype=torch.int32))),
        context_lens_S=torch.cat((meta.context_lens_S, torch.zeros(2, dtype=torch.int32))),
        cu_seqlens_q=torch.cat((meta.cu_seqlens_q, meta.cu_seqlens_q[-1:].expand(2))),
        rows_S=torch.tensor([*ROWS, 0, 0]),
        is_padded=True,
    )
    plain, states = step(model, meta, TOKENS)
    found, same_states = step(model, padded, torch.cat((TOKENS, torch.zeros(5, dtype=torch.int64))))
    assert torch.equal(found[: len(plain)], plain)
    assert all(map(torch.equal, tensors_of(states), tensors_of(same_states)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_in_any_chunks_and_beside_anybody_the_same_bits(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = stacked(tmp_path, variant, dtype)
    model.drop_head()  # torch's product
    sequences, prompt_lens = [random_tokens(length, seed=length) for length in (60, 33, 21, 2)], [50, 33, 7, 1]
    together = forced_logits(model, sequences, prompt_lens)
    again = forced_logits(model, sequences, prompt_lens, seed=1, block_size=16)
    alone = [forced_logits(model, [one], [length])[0] for one, length in zip(sequences, prompt_lens, strict=True)]
    for one, other, third in zip(together, again, alone, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)


@pytest.mark.parametrize("sizes", [(20, 16, 4), (16, 16, 3), (32, 18, 4)], ids=str)
def test_heads_that_are_not_compiled_go_op_by_op(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    """Values that fill no vectors, and all of them no whole words; keys of any even number are."""
    value_size, key_size, num_heads = sizes
    changes = {"linear_value_head_dim": value_size, "linear_key_head_dim": key_size, "linear_num_key_heads": 1}
    path = save_tiny_model(tmp_path, "qwen3_5", **changes, linear_num_value_heads=num_heads)
    model = load_model(path, dtype=torch.float32, device="cpu")
    assert (model.layer_stack is not None) == (sizes == (32, 18, 4))


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("lfm2", {}), ("granite_h", {"mamba_n_heads": 8}), ("mamba", {"intermediate_size": 48}), ("mamba", {})],
)
def test_sizes_that_fill_no_words_go_op_by_op(variant: str, changes: dict[str, int], tmp_path: Path) -> None:
    """Of LFM2 48 channels, of Granite heads of 12 dimensions, of Mamba 48 channels, and 72, 8 of them a matrix."""
    path = save_tiny_model(tmp_path, variant, **changes)
    assert load_model(path, dtype=torch.float32, device="cpu").layer_stack is None
