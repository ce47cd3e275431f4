"""What every token of a step is and where its keys and values go, from the rows that live on the device.

The host says which row computes how many tokens from where; the rest is read and counted here. This is the contract
and the pure-torch reference. Buffers may be larger than the step: what is left over is padding that disturbs nobody,
which is how a CUDA graph is replayed for a smaller step. Knows no scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.ops.attention_metadata import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Room for the inputs of a step of at most T tokens and S sequences of M blocks."""

    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    slot_mapping_T: torch.Tensor  # int64
    context_lens_S: torch.Tensor  # int32
    cu_seqlens_q: torch.Tensor  # int32 [S + 1]
    block_tables_SM: torch.Tensor  # int32

    @classmethod
    def allocate(cls, num_tokens: int, num_seqs: int, num_blocks: int, device: torch.device) -> StepBuffers:
        """Uninitialized: `step_inputs` writes all that anybody reads."""

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device=device)

        return cls(
            input_ids_T=empty(num_tokens),
            positions_T=empty(num_tokens, dtype=torch.int64),
            slot_mapping_T=empty(num_tokens, dtype=torch.int64),
            context_lens_S=empty(num_seqs),
            cu_seqlens_q=empty(num_seqs + 1),
            block_tables_SM=empty(num_seqs, num_blocks),
        )

    def clear(self) -> None:
        """Make it a step of nothing but padding."""
        for name in self.__slots__:
            getattr(self, name).zero_()

    def first(self, num_tokens: int, num_seqs: int) -> StepBuffers:
        """The same memory as room for fewer tokens and sequences."""
        return StepBuffers(
            self.input_ids_T[:num_tokens],
            self.positions_T[:num_tokens],
            self.slot_mapping_T[:num_tokens],
            self.context_lens_S[:num_seqs],
            self.cu_seqlens_q[: num_seqs + 1],
            self.block_tables_SM[:num_seqs],
        )


def step_inputs(
    token_ids_RL: torch.Tensor,
    block_tables_RM: torch.Tensor,
    sequences_3S: torch.Tensor,
    out: StepBuffers,
    *,
    block_size: int,
) -> None:
    """Fill `out` for the step whose sequence s computes `count` tokens of row `row` from position `start` on.

    token_ids_RL, block_tables_RM: int32, the rows. sequences_3S: int64, row, start and count of each sequence; one
    that computes nothing is padding: no query and no context. Tokens come in the order of the sequences; those behind
    the last are padding: token 0 at position 0, stored in the null block. Of a sequence's blocks at least those of its
    context are written (`out` must be so wide); what stands behind them means nothing.
    """
    row_S, start_S, count_S = sequences_3S.unbind(0)
    end_S = count_S.cumsum(0)
    out.cu_seqlens_q[0] = 0
    out.cu_seqlens_q[1:] = end_S
    out.context_lens_S.copy_(torch.where(count_S > 0, start_S + count_S, 0))
    width = out.block_tables_SM.shape[1]
    out.block_tables_SM.copy_(block_tables_RM[:, :width].index_select(0, row_S))
    token_T = torch.arange(out.input_ids_T.numel(), device=row_S.device)
    is_real_T = token_T < end_S[-1]
    seq_T = torch.searchsorted(end_S, token_T, right=True).clamp_max_(len(end_S) - 1)
    position_T = torch.where(is_real_T, start_S[seq_T] + token_T - (end_S - count_S)[seq_T], 0)
    row_T = row_S[seq_T]
    block_T = torch.where(is_real_T, block_tables_RM[row_T, position_T // block_size].long(), NULL_BLOCK)
    offset_T = torch.where(is_real_T, position_T, token_T) % block_size
    out.positions_T.copy_(position_T)
    out.input_ids_T.copy_(torch.where(is_real_T, token_ids_RL[row_T, position_T], 0))
    out.slot_mapping_T.copy_(block_T * block_size + offset_T)
