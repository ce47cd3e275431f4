"""A model loaded with the options that a test names, the others as they are by default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.loading import loader
from bulkrun.models.loading.load_options import LoadOptions


def load_model(
    path: Path | str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    config: ModelConfig | None = None,
    has_head: bool = True,
    **options: Any,
) -> LanguageModel:
    """As `loader.load_model`; `options` are those of `LoadOptions`."""
    made = LoadOptions(dtype=dtype, device=torch.device(device), **options)
    return loader.load_model(path, made, config=config, has_head=has_head)
