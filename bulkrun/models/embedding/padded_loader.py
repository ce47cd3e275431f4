"""A model directory into a `PaddedEncoder`, through transformers: local files, safetensors and its own code only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import logging

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.own_products import use_own_products
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.two_texts import moved_by_padding
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.weight_files import weight_files
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
            model = _stored_model(path, dtype) if files else _random_model(path, dtype)
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
            f"the model does not fit on {device} ({_first_line(error)}); free what other processes hold, or take a "
            "smaller one"
        ) from None
    except Exception as error:
        raise ModelError(f"{what}: transformers cannot load or run it: {_first_line(error)}") from None


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


def _stored_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    model, report = AutoModel.from_pretrained(
        path,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are named below
        output_loading_info=True,
    )
    for kind in ("missing_keys", "mismatched_keys", "error_msgs"):
        wrong = sorted(str(name) for name in report[kind] if _POOLER not in str(name))
        if wrong:
            raise ValueError(f"{kind.replace('_', ' ')}: {', '.join(wrong[:5])}; download the model again")
    return model


def _random_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModel.from_config(config, dtype=dtype, trust_remote_code=False)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
