"""What every token of a step is and where its keys and values go, from the rows that live on the device.

The host says which row computes how many tokens from where; the rest is read and counted here. This is the contract
and the pure-torch reference. Buffers may be larger than the step: what is left over is padding that disturbs nobody,
which is how a CUDA graph is replayed for a smaller step. Knows no scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bulkrun.blocks import NULL_BLOCK


@dataclass(frozen=True, slots=True)
class StepBuffers:
    """Room for the inputs of a step of at most T tokens and S sequences of M blocks."""

    input_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int64
    slot_mapping_T: torch.Tensor  # int64
    context_lens_S: torch.Tensor  # int32
    cu_seqlens_q: torch.Tensor  # int32 [S + 1]
    block_tables_SM: torch.Tensor  # int32
    rows_S: torch.Tensor  # int64; 0 of a sequence that pads

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
            rows_S=empty(num_seqs, dtype=torch.int64),
        )

    def has_sizes(self, num_tokens: int, num_seqs: int, num_blocks: int) -> bool:
        """Whether the buffers have exactly these sizes."""
        return self.input_ids_T.shape[0] == num_tokens and self.block_tables_SM.shape == (num_seqs, num_blocks)

    def clear(self) -> None:
        """Make it a step of nothing but padding."""
        for name in self.__slots__:
            getattr(self, name).zero_()

    def first(self, num_tokens: int, num_seqs: int) -> StepBuffers:
        """These buffers, cut to fewer tokens and sequences; the memory is shared."""
        return StepBuffers(
            self.input_ids_T[:num_tokens],
            self.positions_T[:num_tokens],
            self.slot_mapping_T[:num_tokens],
            self.context_lens_S[:num_seqs],
            self.cu_seqlens_q[: num_seqs + 1],
            self.block_tables_SM[:num_seqs],
            self.rows_S[:num_seqs],
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
    out.rows_S.copy_(row_S)
    end_S = count_S.cumsum(0)
    num_tokens = int(end_S[-1])
    out.cu_seqlens_q[0] = 0
    out.cu_seqlens_q[1:].copy_(end_S)
    out.context_lens_S.copy_((start_S + count_S).mul_(count_S > 0))
    num_blocks = out.block_tables_SM.shape[1]
    torch.index_select(block_tables_RM[:, :num_blocks], 0, row_S, out=out.block_tables_SM)
    _pad(out, num_tokens, block_size)
    seq_T = torch.repeat_interleave(count_S, output_size=num_tokens)
    row_T = row_S.index_select(0, seq_T)
    position_T = out.positions_T[:num_tokens]
    torch.arange(num_tokens, out=position_T)
    position_T += (start_S + count_S).sub_(end_S).index_select(0, seq_T)
    torch.take(token_ids_RL, row_T * token_ids_RL.shape[1] + position_T, out=out.input_ids_T[:num_tokens])
    index_T = position_T // block_size
    block_T = torch.take(block_tables_RM, row_T.mul_(block_tables_RM.shape[1]).add_(index_T))
    slot_T = out.slot_mapping_T[:num_tokens]
    torch.sub(block_T, index_T, out=slot_T).mul_(block_size).add_(position_T)  # block * size + position - index * size


def append_tokens(
    token_ids_RL: torch.Tensor, row_S: torch.Tensor, position_S: torch.Tensor, token_S: torch.Tensor
) -> None:
    """Write each sequence's new token into its row, int32, at a position; the others int64 [S], no two places alike."""
    token_ids_RL[row_S, position_S] = token_S.int()


def _pad(out: StepBuffers, first: int, block_size: int) -> None:
    """Make the tokens from `first` on padding."""
    num_padding = out.input_ids_T.numel() - first
    if num_padding:
        out.input_ids_T[first:] = out.positions_T[first:] = 0
        offset_T = torch.arange(num_padding, device=out.slot_mapping_T.device) % block_size
        out.slot_mapping_T[first:] = NULL_BLOCK * block_size + offset_T
