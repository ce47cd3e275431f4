"""Masks of allowed tokens in Triton. Penalties touch few logits of few rows and stay in torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits per program


def apply_token_masks(logits_SV: torch.Tensor, mask_CW: torch.Tensor, row_C: torch.Tensor) -> None:
    """As the reference."""
    assert logits_SV.is_contiguous()
    num_masks, num_words = mask_CW.shape
    vocab_size = logits_SV.shape[1]
    if num_masks:
        _token_mask_kernel[(num_masks, triton.cdiv(vocab_size, _TILE))](
            logits_SV,
            mask_CW.contiguous(),
            row_C.contiguous(),
            num_words,
            VOCAB_SIZE=vocab_size,
            TILE=_TILE,
            num_warps=8,
        )


@triton.jit(do_not_specialize=["num_words"])
def _token_mask_kernel(logits_ptr, mask_ptr, row_ptr, num_words, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + index)
    token_V = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word_V = tl.load(mask_ptr + index * num_words + token_V // 32, mask=token_V // 32 < num_words, other=0)
    is_forbidden_V = ((word_V >> (token_V % 32)) & 1) == 0
    no_chance_V = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * VOCAB_SIZE + token_V, no_chance_V, mask=is_forbidden_V & (token_V < VOCAB_SIZE))
