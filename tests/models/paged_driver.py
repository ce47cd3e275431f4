"""Runs sequences through a `Decoder` the way an engine does, with none of an engine's policy: a test's hand crank.

Each step mixes decode tokens and prompt chunks of odd sizes; blocks are handed out shuffled.
"""

from __future__ import annotations

import random

import torch

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.recurrent_state import RecurrentState
from bulkrun.ops import AttentionMetadata


def make_metadata(
    chunks: list[tuple[int, int]],
    block_tables: list[list[int]],
    block_size: int,
    num_decode_seqs: int,
    rows: list[int] | None = None,
) -> AttentionMetadata:
    """Metadata of a step, built token by token: chunk (start, end) of each sequence, decode sequences first.

    rows: where the sequences keep states; None: in their order.
    """
    slots = [table[p // block_size] * block_size + p % block_size
             for (start, end), table in zip(chunks, block_tables, strict=True) for p in range(start, end)]  # fmt: skip
    width = max(map(len, block_tables))
    lens = [end - start for start, end in chunks]
    return AttentionMetadata(
        slot_mapping_T=torch.tensor(slots),
        block_tables_SM=torch.tensor([t + [0] * (width - len(t)) for t in block_tables], dtype=torch.int32),
        context_lens_S=torch.tensor([end for _, end in chunks], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *torch.tensor(lens).cumsum(0).tolist()], dtype=torch.int32),
        num_decode_seqs=num_decode_seqs,
        max_query_len=max(lens),
        max_context_len=max(end for _, end in chunks),
        rows_S=torch.tensor([*range(len(chunks))] if rows is None else rows),
    )


def allocate_states(model: Decoder, cache: KVCache, num_rows: int) -> None:
    """Room for the states of so many sequences, full of what is no number."""
    cache.states = RecurrentState.allocate(model.config, num_rows, model.dtype, model.device)
    for state in cache.states:
        for rows in state.tensors:
            rows.fill_(float("nan"))


# where more than 1.5e-4 was measured between ours and transformers': twice that
_TOLERANCES = {
    "qwen3_5": 1e-3, "qwen3_next": 6e-4, "kimi_linear": 7e-4, "bamba": 1e-3, "gemma": 4e-4, "vaultgemma": 4e-4,
    "gemma3n": 9e-4, "gemma3n_whole_panels": 4e-4,
}  # fmt: skip


def tolerance_of(variant: str) -> float:
    """How far logits of float32, which spread by 3, may be from transformers'.

    States add up what is rounded: weights of qwen3_5, kimi_linear or bamba that differ by 6e-8 of themselves move
    logits by 3e-4 to 4e-4 in transformers alone, and processors that add in another order find other bits.
    """
    return _TOLERANCES.get(variant, 3e-4)


def assert_same_tokens(ours: torch.Tensor, theirs: torch.Tensor, rounding: float = 1e-5) -> None:
    """Logits [..., V] have their maximum at the same token; either of two that only rounding tells apart will do."""
    first, second = theirs.topk(2, -1).values.unbind(-1)
    is_clear = first - second > rounding
    assert is_clear.float().mean() > 0.9, "nearly every choice must be one"
    assert torch.equal(ours.argmax(-1)[is_clear], theirs.argmax(-1)[is_clear])


@torch.inference_mode()
def forced_logits(
    model: Decoder,
    sequences: list[list[int]],
    prompt_lens: list[int],
    *,
    seed: int = 0,
    block_size: int = 8,
    kv_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Logits [len, V] at every position of each sequence, prompts in random chunks, the rest token by token.

    kv_dtype: what the cache holds; None: the model's dtype.
    """
    rng = random.Random(seed)
    blocks = list(range(1, 1 + sum(len(s) // block_size + 1 for s in sequences)))
    rng.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(len(s) // block_size + 1)] for s in sequences]
    num_blocks = 1 + sum(map(len, tables))
    cache = KVCache.allocate(model.config, num_blocks, block_size, kv_dtype or model.dtype, model.device)
    allocate_states(model, cache, len(sequences))
    done = [0] * len(sequences)
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(d < len(s) for d, s in zip(done, sequences, strict=True)):
        running = [i for i, s in enumerate(sequences) if done[i] < len(s) and rng.random() < 0.8]
        decode = [i for i in running if done[i] >= prompt_lens[i]]
        prefill = [i for i in running if done[i] < prompt_lens[i]]
        ends = {i: done[i] + 1 for i in decode}
        ends |= {i: min(prompt_lens[i], done[i] + rng.choice([1, 3, 7, 20, 33])) for i in prefill}
        order = decode + prefill
        if not order:
            continue
        meta = make_metadata(
            [(done[i], ends[i]) for i in order], [tables[i] for i in order], block_size, len(decode), order
        )
        ids = torch.tensor([t for i in order for t in sequences[i][done[i] : ends[i]]])
        positions = torch.tensor([p for i in order for p in range(done[i], ends[i])])
        out = model.compute_logits(model(ids, positions, cache, meta))
        for i, part in zip(order, out.split([ends[i] - done[i] for i in order]), strict=True):
            logits[i].append(part)
            done[i] = ends[i]
    return [torch.cat(parts) for parts in logits]
