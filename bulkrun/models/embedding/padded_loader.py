"""A model directory into a `PaddedEncoder`, through transformers: local files, safetensors and its own code only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.utils import logging

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.own_products import use_own_products
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.two_texts import moved_by_padding
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.loading.from_transformers import first_line, random_model, stored_model
from bulkrun.models.loading.weights_fit import refuse_beyond_ram
from bulkrun.settings import Quantization

_POOLER = "pooler."  # a head over the first token, which no vector is made with; many checkpoints lack it


def load_padded_encoder(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    load_format: str,
    quantization: Quantization | None = None,
) -> PaddedEncoder:
    """Load the model, check that padding changes nothing, and exchange its products for the engine's.

    `load_format` dummy: with transformers' own seeded initialization. `quantization`: of its `nn.Linear` modules.
    Raises ModelError for an architecture that transformers does not have, for missing or mis-shaped tensors, for
    weights beyond the memory that is left, and for a model in which a text's hidden states depend on padding. Tensors
    that the architecture has no place for, such as heads, are left alone, as transformers leaves them.
    """
    files = [] if load_format == "dummy" else weight_files(path)
    num_weights = sum(math.prod(stored.shape) for stored in stored_tensors(files))
    refuse_beyond_ram(num_weights * dtype.itemsize, device, can_quantize=False)
    with _errors_named(f"{path}: {config.architecture} is not supported", device):
        with _no_reports():
            if files:
                model = stored_model(AutoModel, path, dtype, may_miss=lambda name: _POOLER in name)
            else:
                model = random_model(AutoModel, path, dtype, device)
        model.config.use_cache = False
        encoder = PaddedEncoder(model.to(device).eval().requires_grad_(False), config)
        moved, may_move = moved_by_padding(encoder)
        use_own_products(encoder, quantization)
    if not moved < may_move:
        raise ModelError(
            f"{path}: {config.architecture} is not supported: beside a longer text its hidden states are off by "
            f"{moved:.1%} of their spread; something in it looks at padding"
        )
    return encoder


@contextmanager
def _errors_named(what: str, device: torch.device) -> Iterator[None]:
    """transformers has no errors of its own: each is a ModelError, and those of memory say so."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from None
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit on {device} ({first_line(error)}); free what other processes hold, or take a "
            "smaller one"
        ) from None
    except Exception as error:
        raise ModelError(f"{what}: transformers cannot load or run it: {first_line(error)}") from None


@contextmanager
def _no_reports() -> Iterator[None]:
    """No bars, and no warnings of tensors that have no place; those that are missing are an error here."""
    logging.disable_progress_bar()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
