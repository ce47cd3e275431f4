"""Masks of allowed tokens and penalties for repetition in Triton, in place.

Penalties count in a number for each token of the vocabulary, for a few rows at a time: it is zero before and after, so
that only what occurs is ever touched. Which of a token's occurrences penalizes it is left to chance: all do alike.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TILE = 4096  # logits per program
_TOKENS = 256  # of a row, per program
_MAX_COUNTS = 2**24  # held at once: 64 MiB
_OF_PROMPT = tl.constexpr(1 << 30)  # beside the count of a token in the output: it occurs in the prompt


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


def apply_penalties(
    logits_SV: torch.Tensor,
    row_A: torch.Tensor,
    token_ids_AP: torch.Tensor,
    prompt_lens_A: torch.Tensor,
    total_lens_A: torch.Tensor,
    *,
    presence_A: torch.Tensor,
    frequency_A: torch.Tensor,
    repetition_A: torch.Tensor,
) -> None:
    """As the reference."""
    assert logits_SV.is_contiguous() and token_ids_AP.stride(1) == 1
    vocab_size = logits_SV.shape[1]
    at_once = max(_MAX_COUNTS // vocab_size // 4, 1) * 4  # slices stay aligned, or another kernel is compiled
    counts = torch.zeros(min(at_once, len(row_A)), vocab_size, dtype=torch.int32, device=logits_SV.device)
    inputs = (row_A, token_ids_AP, prompt_lens_A, total_lens_A, presence_A, frequency_A, repetition_A)
    for row_C, tokens_CP, prompt_C, total_C, *penalties in zip(*(one.split(at_once) for one in inputs), strict=True):
        grid = (len(row_C), triton.cdiv(tokens_CP.shape[1], _TOKENS))
        tokens = (counts, tokens_CP, total_C, tokens_CP.stride(0))
        _count_kernel[grid](*tokens, prompt_C, VOCAB_SIZE=vocab_size, TOKENS=_TOKENS)
        _penalize_kernel[grid](*tokens, logits_SV, row_C, *penalties, VOCAB_SIZE=vocab_size, TOKENS=_TOKENS)


@triton.jit(do_not_specialize=["stride"])
def _count_kernel(
    counts_ptr, tokens_ptr, total_lens_ptr, stride, prompt_lens_ptr, VOCAB_SIZE: tl.constexpr, TOKENS: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    position_P = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_there_P = position_P < tl.load(total_lens_ptr + index)
    token_P = tl.load(tokens_ptr + index * stride + position_P, mask=is_there_P, other=0)
    count_ptr_P = counts_ptr + index * VOCAB_SIZE + token_P
    is_output_P = position_P >= tl.load(prompt_lens_ptr + index)
    tl.atomic_add(count_ptr_P, 1, mask=is_there_P & is_output_P, sem="relaxed")
    tl.atomic_or(count_ptr_P, _OF_PROMPT, mask=is_there_P & (is_output_P == 0), sem="relaxed")


@triton.jit(do_not_specialize=["stride"])
def _penalize_kernel(
    counts_ptr,
    tokens_ptr,
    total_lens_ptr,
    stride,
    logits_ptr,
    row_ptr,
    presence_ptr,
    frequency_ptr,
    repetition_ptr,
    VOCAB_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64)
    position_P = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    is_there_P = position_P < tl.load(total_lens_ptr + index)
    token_P = tl.load(tokens_ptr + index * stride + position_P, mask=is_there_P, other=0)
    count_P = tl.atomic_xchg(counts_ptr + index * VOCAB_SIZE + token_P, 0, mask=is_there_P, sem="relaxed")
    is_first_P = is_there_P & (count_P != 0)
    times_P = (count_P & (_OF_PROMPT - 1)).to(tl.float32)
    logit_ptr_P = logits_ptr + tl.load(row_ptr + index) * VOCAB_SIZE + token_P
    raw_P = tl.load(logit_ptr_P, mask=is_first_P, other=0.0)
    repetition_P = tl.zeros([TOKENS], tl.float32) + tl.load(repetition_ptr + index)
    penalized_P = tl.where(raw_P > 0, tl.div_rn(raw_P, repetition_P), raw_P * repetition_P)
    presence_P = tl.where(times_P > 0, tl.load(presence_ptr + index), 0.0)
    tl.store(logit_ptr_P, penalized_P - (tl.load(frequency_ptr + index) * times_P + presence_P), mask=is_first_P)


@triton.jit(do_not_specialize=["num_words"])
def _token_mask_kernel(logits_ptr, mask_ptr, row_ptr, num_words, VOCAB_SIZE: tl.constexpr, TILE: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(row_ptr + index)
    token_V = tl.program_id(1) * TILE + tl.arange(0, TILE)
    word_V = tl.load(mask_ptr + index * num_words + token_V // 32, mask=token_V // 32 < num_words, other=0)
    is_forbidden_V = ((word_V >> (token_V % 32)) & 1) == 0
    no_chance_V = tl.full([TILE], float("-inf"), tl.float32)
    tl.store(logits_ptr + row * VOCAB_SIZE + token_V, no_chance_V, mask=is_forbidden_V & (token_V < VOCAB_SIZE))
