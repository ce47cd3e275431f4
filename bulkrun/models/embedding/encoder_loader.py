"""A model directory into an encoder, through transformers: local files, safetensors and its own code only.

Compiled where that can be (`compiled_encoder`); else transformers' code runs, with the engine's products in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel, PreTrainedModel

from bulkrun.errors import ModelError, UsageError, first_line
from bulkrun.models.config.adapter_fit import AdapterError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.embedding.compiled_encoder import compile_encoder
from bulkrun.models.embedding.compiled_modernbert import compile_modernbert
from bulkrun.models.embedding.own_products import use_own_products
from bulkrun.models.embedding.packed_encoder import pack_encoder
from bulkrun.models.embedding.packed_transformer import pack_transformer
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.embedding.two_texts import hidden_states, moved_by_padding
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.loading.from_transformers import (
    no_reports,
    own_weights,
    random_model,
    refuse_quantized_tensors,
    stored_model,
)
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.weights_fit import refuse_beyond_ram
from bulkrun.settings import Quantization

_POOLER = "pooler."  # a head over the first token, which no vector is made with; many checkpoints lack it


def load_encoder(path: Path, config: ModelConfig, options: LoadOptions) -> TextEncoder:
    """Load the model, check that padding changes nothing, and have it computed as fast as this device can.

    Random weights are transformers' own seeded initialization. Raises ModelError for an architecture that transformers
    does not have, for missing or mis-shaped tensors, for an adapter that does not fit, for weights beyond the memory
    that is left, and for a model in which a text's hidden states depend on padding; UsageError for `deterministic`
    where it is not compiled. Tensors that the architecture has no place for, such as heads, are left alone, as
    transformers leaves them.
    """
    refuse_unfit(path, options)
    with errors_named(f"{path}: {config.architecture} is not supported", options.device):
        model = load_transformer(AutoModel, path, options, may_miss=lambda name: _POOLER in name)
        padded = PaddedEncoder(model, config)
        _refuse_other_width(padded)
        return fast_encoder(padded, options.quantization, deterministic=options.deterministic)


def refuse_unfit(path: Path, options: LoadOptions) -> None:
    """Raise ModelError for weights that are missing or stored quantized, or that memory does not hold."""
    tensors = [] if options.load_format == "dummy" else list(stored_tensors(weight_files(path)))
    refuse_quantized_tensors(tensors)
    num_weights = sum(math.prod(stored.shape) for stored in tensors)
    refuse_beyond_ram(num_weights * options.dtype.itemsize, options.device, can_quantize=False)


def load_transformer(
    auto_class: Any, path: Path, options: LoadOptions, *, may_miss: Callable[[str], bool], **more: Any
) -> PreTrainedModel:
    """The model of a directory by one of transformers' Auto classes, on its device.

    What an adapter holds whole the model's files may lack. `more` goes to transformers. Raises what `stored_model`
    does.
    """
    dtype, device, adapter = options.dtype, options.device, options.adapter
    with no_reports():
        if options.load_format == "dummy":
            model: Any = random_model(auto_class, path, dtype, device)
        else:
            own = () if adapter is None else adapter.whole
            model = stored_model(
                auto_class, path, dtype, may_miss=lambda name: may_miss(name) or name in own, adapter=adapter, **more
            )
    model.config.use_cache = False
    return own_weights(model.to(device)).eval().requires_grad_(False)


def fast_encoder(
    encoder: PaddedEncoder, quantization: Quantization | None, *, deterministic: bool = False
) -> TextEncoder:
    """The same, computed as fast as its device can; it must not be used itself afterwards.

    Raises ModelError where a text's hidden states depend on padding, UsageError for `deterministic` where it is not
    compiled.
    """
    _refuse_moved_by_padding(encoder)
    compiled = compile_encoder(encoder, quantization) or compile_modernbert(encoder, quantization)
    if compiled is not None:
        return compiled
    if deterministic:
        raise UsageError(
            f"engine.deterministic: on this device {encoder.config.architecture} runs through transformers' own code, "
            "whose sums depend on the batch; leave the key out"
        )
    if (packed := pack_encoder(encoder, quantization)) is not None:
        return packed
    chosen = pack_transformer(encoder) or encoder
    use_own_products(chosen, quantization)
    return chosen


def _refuse_other_width(encoder: PaddedEncoder) -> None:
    """Raise ModelError where vectors would be cut: some models (EmbeddingGemma 2) project what comes out of layers."""
    width = hidden_states(encoder).shape[1]
    if width != encoder.config.hidden_size:
        raise ModelError(
            f"a token's hidden state is of {width} numbers, and config.json's hidden_size is "
            f"{encoder.config.hidden_size}; take another model"
        )


def _refuse_moved_by_padding(encoder: PaddedEncoder) -> None:
    moved, may_move = moved_by_padding(encoder)
    if not moved < may_move:
        raise ModelError(
            f"beside a longer text its hidden states are off by {moved:.1%} of their spread; something in it looks at "
            "padding"
        )


@contextmanager
def errors_named(what: str, device: torch.device) -> Iterator[None]:
    """transformers has no errors of its own: each is a ModelError, and those of memory say so."""
    try:
        yield
    except (UsageError, AdapterError):
        raise
    except ModelError as error:
        raise ModelError(f"{what}: {error}") from None
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"the model does not fit on {device} ({first_line(error)}); free what other processes hold, or take a "
            "smaller one"
        ) from None
    except Exception as error:
        raise ModelError(f"{what}: transformers cannot load or run it: {first_line(error)}") from None
