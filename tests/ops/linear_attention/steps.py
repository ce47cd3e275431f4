"""Steps for ops that keep a state: sequences that begin and go on, in rows out of order, with padding between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from bulkrun.ops import AttentionMetadata

NUM_ROWS = 7
NO_CACHE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True)
class Part:
    """A sequence's share of a step."""

    row: int
    before: int  # tokens that earlier steps have computed
    count: int  # 0: it pads the step


MIXED = [Part(5, 9, 1), Part(2, 0, 1), Part(0, 0, 0), Part(3, 0, 13), Part(0, 4, 2), Part(0, 0, 0), Part(6, 0, 35)]
DECODE = [Part(1, 3, 1), Part(6, 1, 1), Part(4, 0, 1)]


def make_meta(parts: list[Part], device: torch.device | str = "cpu", *, num_padding: int = 0) -> AttentionMetadata:
    """What the ops are told of a step, which may have tokens of nobody at its end."""
    counts = [part.count for part in parts]
    lens = [part.before + part.count if part.count else 0 for part in parts]
    meta = AttentionMetadata(
        slot_mapping_T=NO_CACHE,
        block_tables_SM=NO_CACHE,
        context_lens_S=torch.tensor(lens, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        num_decode_seqs=0,
        max_query_len=max(counts),
        max_context_len=max(lens),
        rows_S=torch.tensor([part.row for part in parts], device=device),
    )
    return replace(meta, is_padded=num_padding > 0)


def num_tokens(parts: list[Part]) -> int:
    """Tokens of a step's sequences."""
    return sum(part.count for part in parts)
