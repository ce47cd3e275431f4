"""Masks and penalties, compiled: only the logits that change are touched. Contract: `ops.sampling.shape_logits`."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache

import torch

from bulkrun.ops.cpu.library import c_function
from bulkrun.ops.sampling import shape_logits as reference


def apply_token_masks(logits_SV: torch.Tensor, mask_CW: torch.Tensor, row_C: torch.Tensor) -> None:
    """As the reference."""
    if not _is_plain(logits_SV):
        reference.apply_token_masks(logits_SV, mask_CW, row_C)
        return
    mask_CW, row_C = mask_CW.contiguous(), row_C.contiguous()
    run = _function("apply_token_masks", 3, 4)
    sizes = (row_C.numel(), logits_SV.shape[1], mask_CW.shape[1])
    run(logits_SV.data_ptr(), mask_CW.data_ptr(), row_C.data_ptr(), *sizes, torch.get_num_threads())


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
    if not _is_plain(logits_SV):
        reference.apply_penalties(
            logits_SV, row_A, token_ids_AP, prompt_lens_A, total_lens_A,
            presence_A=presence_A, frequency_A=frequency_A, repetition_A=repetition_A,
        )  # fmt: skip
        return
    inputs = (row_A, token_ids_AP.int(), prompt_lens_A, total_lens_A, presence_A, frequency_A, repetition_A)
    plain = [one.contiguous() for one in inputs]
    sizes = (row_A.numel(), logits_SV.shape[1], token_ids_AP.shape[1])
    run = _function("apply_penalties", 8, 4)
    run(logits_SV.data_ptr(), *(one.data_ptr() for one in plain), *sizes, torch.get_num_threads())


def _is_plain(logits_SV: torch.Tensor) -> bool:
    return logits_SV.dtype == torch.float32 and logits_SV.is_contiguous()


@cache
def _function(name: str, num_tensors: int, num_numbers: int) -> Callable[..., None]:
    return c_function(name, *[c_void_p] * num_tensors, *[c_int64] * (num_numbers - 1), c_int)
