"""A model directory into a `PaddedEncoder`, through transformers: local files, safetensors and its own code only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers.utils import logging

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.general.in_float32 import in_float32
from bulkrun.models.loading.weights_fit import refuse_beyond_ram

_POOLER = "pooler."  # a head over the first token, which no vector is made with; many checkpoints lack it
_CHECKED_LENS = (5, 12)
# share of the hidden states' spread, of the worst token. Padding was seen to move right models by 1e-6 in float32; one
# that mixes in what stands beside a token, with random weights that are too small to do much, by 0.005
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 0.1


def load_padded_encoder(
    path: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device, load_format: str
) -> PaddedEncoder:
    """Load the model and check that padding changes nothing.

    `load_format` dummy: with transformers' own seeded initialization. Raises ModelError for an architecture that
    transformers does not have, for missing or mis-shaped tensors, for weights beyond the memory that is left, and for a
    model in which a text's hidden states depend on padding. Tensors that the architecture has no place for, such as
    heads, are left alone, as transformers leaves them.
    """
    files = [] if load_format == "dummy" else weight_files(path)
    num_weights = sum(math.prod(stored.shape) for stored in stored_tensors(files))
    refuse_beyond_ram(num_weights * dtype.itemsize, device, can_quantize=False)
    with _errors_named(f"{path}: {config.architecture} is not supported", device):
        with _no_reports():
            model = _stored_model(path, dtype) if files else _random_model(path, dtype)
        model.config.use_cache = False
        encoder = PaddedEncoder(model.to(device).eval().requires_grad_(False), config)
        distance, tolerance = _checked_distance(encoder)
    if not distance < tolerance:
        raise ModelError(
            f"{path}: {config.architecture} is not supported: beside a longer text its hidden states are off by "
            f"{distance:.1%} of their spread; something in it looks at padding"
        )
    return encoder


@contextmanager
def _errors_named(what: str, device: torch.device) -> Iterator[None]:
    """transformers has no errors of its own: each is a ModelError, and those of memory say so."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit on {device} ({_first_line(error)}); free what other processes hold, or take a "
            "smaller one"
        ) from None
    except Exception as error:
        raise ModelError(f"{what}: transformers cannot load or run it: {_first_line(error)}") from None


def _checked_distance(encoder: PaddedEncoder) -> tuple[float, float]:
    """How far padding moves hidden states, and how far it may: in float32, where rounding hides nothing."""
    if encoder.dtype != torch.float32:
        # code that casts to a dtype of its own choice, and memory too small for a layer in float32, leave the other way
        with suppress(RuntimeError), in_float32(encoder.model):
            return _distance(encoder), _TOLERANCE
    return _distance(encoder), _TOLERANCE if encoder.dtype == torch.float32 else _HALF_TOLERANCE


@torch.inference_mode()
def _distance(encoder: PaddedEncoder) -> float:
    """How far a text's hidden states beside a longer one are from those it has alone."""
    limit = min(encoder.config.vocab_size, 1000)
    texts = [[(7 + 13 * place) % limit for place in range(length)] for length in _CHECKED_LENS]
    beside_TE = encoder(PackedTexts.of(texts, encoder.device))[: _CHECKED_LENS[0]].float()
    alone_TE = encoder(PackedTexts.of(texts[:1], encoder.device)).float()
    return float(((beside_TE - alone_TE).abs().mean(-1) / alone_TE.std(-1)).max())


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
