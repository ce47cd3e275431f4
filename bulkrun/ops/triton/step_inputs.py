"""Step preparation in one launch: a program per sequence, and one for the padding. Knows no scheduling."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from bulkrun.blocks import NULL_BLOCK
from bulkrun.ops.step_inputs import StepBuffers

_TILE = 1024  # tokens, block ids or counts that a program takes at a time


def step_inputs(
    token_ids_RL: torch.Tensor,
    block_tables_RM: torch.Tensor,
    sequences_3S: torch.Tensor,
    out: StepBuffers,
    *,
    block_size: int,
) -> None:
    """As the reference; block ids behind a sequence's context are left as they are."""
    assert sequences_3S.is_contiguous() and token_ids_RL.is_contiguous() and block_tables_RM.is_contiguous()
    num_seqs = sequences_3S.shape[1]
    _step_inputs_kernel[(num_seqs + 1,)](
        token_ids_RL,
        block_tables_RM,
        sequences_3S,
        out.input_ids_T,
        out.positions_T,
        out.slot_mapping_T,
        out.context_lens_S,
        out.cu_seqlens_q,
        out.block_tables_SM,
        out.rows_S,
        num_seqs,
        out.input_ids_T.numel(),
        token_ids_RL.stride(0),
        block_tables_RM.stride(0),
        out.block_tables_SM.stride(0),
        BLOCK_SIZE=block_size,
        PADDING_SLOT=NULL_BLOCK * block_size,
        TILE=_TILE,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "tokens_stride", "blocks_stride", "table_stride"])
def _step_inputs_kernel(
    token_ids_ptr,
    row_blocks_ptr,
    sequences_ptr,
    input_ids_ptr,
    positions_ptr,
    slot_mapping_ptr,
    context_lens_ptr,
    cu_seqlens_ptr,
    block_tables_ptr,
    rows_ptr,
    num_seqs,
    num_tokens,
    tokens_stride,
    blocks_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    PADDING_SLOT: tl.constexpr,
    TILE: tl.constexpr,
):
    seq = tl.program_id(0)
    item_I = tl.arange(0, TILE)
    first_token = seq * 0
    for first in range(0, seq, TILE):  # the tokens of all sequences before
        other_I = first + item_I
        count_I = tl.load(sequences_ptr + 2 * num_seqs + other_I, mask=other_I < seq, other=0)
        first_token += tl.sum(count_I, 0).to(tl.int32)
    tl.store(cu_seqlens_ptr + seq, first_token)
    if seq == num_seqs:
        for first in range(first_token, num_tokens, TILE):
            token_I = first + item_I
            is_real_I = token_I < num_tokens
            tl.store(input_ids_ptr + token_I, item_I * 0, mask=is_real_I)
            tl.store(positions_ptr + token_I, item_I * 0, mask=is_real_I)
            tl.store(slot_mapping_ptr + token_I, PADDING_SLOT + token_I % BLOCK_SIZE, mask=is_real_I)
        return

    row = tl.load(sequences_ptr + seq)
    tl.store(rows_ptr + seq, row)
    start = tl.load(sequences_ptr + num_seqs + seq).to(tl.int32)
    count = tl.load(sequences_ptr + 2 * num_seqs + seq).to(tl.int32)
    context_len = tl.where(count > 0, start + count, 0)
    tl.store(context_lens_ptr + seq, context_len)
    blocks_ptr = row_blocks_ptr + row * blocks_stride
    for first in range(0, tl.cdiv(context_len, BLOCK_SIZE), TILE):
        index_I = first + item_I
        is_real_I = index_I < tl.cdiv(context_len, BLOCK_SIZE)
        block_I = tl.load(blocks_ptr + index_I, mask=is_real_I, other=0)
        tl.store(block_tables_ptr + seq.to(tl.int64) * table_stride + index_I, block_I, mask=is_real_I)
    for first in range(0, count, TILE):
        is_real_I = first + item_I < count
        token_I, position_I = first_token + first + item_I, start + first + item_I
        token_id_I = tl.load(token_ids_ptr + row * tokens_stride + position_I, mask=is_real_I, other=0)
        block_I = tl.load(blocks_ptr + position_I // BLOCK_SIZE, mask=is_real_I, other=0).to(tl.int64)
        tl.store(input_ids_ptr + token_I, token_id_I, mask=is_real_I)
        tl.store(positions_ptr + token_I, position_I, mask=is_real_I)
        tl.store(slot_mapping_ptr + token_I, block_I * BLOCK_SIZE + position_I % BLOCK_SIZE, mask=is_real_I)
