"""Which tokens of a step belong to which sequence's state. For the references; kernels look it up themselves."""

from __future__ import annotations

from typing import NamedTuple

import torch

from bulkrun.ops.attention.metadata import AttentionMetadata


class Chunks(NamedTuple):
    """The sequences of a step that compute something, S' of them; each owns consecutive tokens."""

    row_S: torch.Tensor  # int64: where its state is
    first_S: torch.Tensor  # int64: its first token among the step's
    count_S: torch.Tensor  # int64: its tokens, at least one
    begins_S: torch.Tensor  # bool: there is nothing before these tokens, so what the row holds is another's


def chunks_of(meta: AttentionMetadata) -> Chunks:
    """Those of a step, without the sequences that pad it."""
    assert meta.rows_S is not None, "layers with a state are given where it is"
    bounds = meta.cu_seqlens_q.long()
    count_S = bounds.diff()
    real = count_S.nonzero()[:, 0]
    begins_S = meta.context_lens_S == count_S
    return Chunks(meta.rows_S[real], bounds[:-1][real], count_S[real], begins_S[real])


def states_before(state_R: torch.Tensor, chunks: Chunks) -> torch.Tensor:
    """A copy [S', ...] of the sequences' states in float32: zeros for one that begins, whatever the row held."""
    shape = (-1, *[1] * (state_R.ndim - 1))
    return state_R[chunks.row_S].float().masked_fill_(chunks.begins_S.view(shape), 0.0)
