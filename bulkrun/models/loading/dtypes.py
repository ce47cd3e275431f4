"""Which dtype a model is computed in: what the user names, else what its files and the device suggest."""

from __future__ import annotations

import logging

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.ops.matmul.linear import can_pack_bfloat16
from bulkrun.settings import Dtype


def dtype_of(name: Dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype that `engine.dtype` means; auto: `default_dtype`."""
    dtype: torch.dtype = default_dtype(config, device) if name == "auto" else getattr(torch, name)
    return dtype


def default_dtype(config: ModelConfig, device: torch.device | str) -> torch.dtype:
    """The model's dtype; on a CPU bfloat16 only where the processor multiplies it natively, and never float16."""
    dtype: torch.dtype = getattr(torch, config.dtype)
    if torch.device(device).type != "cpu":
        if dtype == torch.float32:
            logging.getLogger(__name__).warning(
                "the model's dtype is float32, in which a GPU is many times slower; set engine.dtype: bfloat16"
            )
        return dtype
    if dtype == torch.float32:
        return dtype
    return torch.bfloat16 if dtype == torch.bfloat16 and cpu_multiplies_bfloat16() else torch.float32


def cpu_multiplies_bfloat16() -> bool:
    """Whether this processor has matrix units for bf16 and this torch uses them."""
    return can_pack_bfloat16() and (torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
