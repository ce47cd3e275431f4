"""What attention must know of a step's batch: which tokens belong to which sequence and where their KV lives.

Shape legend used in ops/, models/ and engine/: T tokens in the step, S sequences in the step, R permanent rows,
M blocks per sequence, N blocks in the pool, B tokens per block, L layers, E model width, H query heads,
K key/value heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from bulkrun.ops.sequence_groups import SequenceGroup

NULL_BLOCK = 0  # never allocated: padding in block tables points here, and padded tokens may write here


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """A mixed step: sequences in decode come first, each with one query token; then chunks of prompts.

    The integers are known to the host without asking the device. Sequence s owns query tokens
    `cu_seqlens_q[s]:cu_seqlens_q[s + 1]`; its last query token is at position `context_lens_S[s] - 1`.
    """

    slot_mapping_T: torch.Tensor  # int64: block id * B + offset, where each token's K and V are written
    block_tables_SM: torch.Tensor  # int32: block ids in order, padded with NULL_BLOCK
    context_lens_S: torch.Tensor  # int32: tokens in the KV cache after this step's are written
    cu_seqlens_q: torch.Tensor  # int32 [S + 1]: prefix sum of query tokens
    num_decode_seqs: int  # the first so many sequences have exactly one query token
    max_query_len: int
    max_context_len: int
    # int64 [2, C]: slots whose KV is copied and where to, after the step's KV is stored and before anybody attends
    kv_copies: torch.Tensor | None = None
    # sliding window -> padding plan of the reference attention: made by the first layer, shared by the others
    groups: dict[int | None, list[SequenceGroup]] = field(default_factory=dict, init=False, repr=False, compare=False)
