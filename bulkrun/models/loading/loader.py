"""Weights from a checkpoint into a `Decoder`: memory never exceeds the model, one tensor and what is read ahead.

A missing, unexpected or mis-shaped tensor is an error that names it, before the model is read. Which tensors there are
stands in `stored_weights`, which of them belong together in `any_weights`, where each goes in `tensor_names`, which
files hold them in `weight_files`, where in a file each lies in `checkpoint`, how it gets into memory in `read_ahead`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from bulkrun.errors import first_line
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.compiled_layers import compile_layers
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.invariant import make_invariant, refuse_invariance
from bulkrun.models.decoder.layers import ExpertLinear, Linear
from bulkrun.models.decoder.norms import fill_norms
from bulkrun.models.decoder.quantized_layers import QuantizedLinear
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.files.read_ahead import read_tensors, release_pinned
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.host_memory import untouched_zeros
from bulkrun.models.language_model import LanguageModel
from bulkrun.models.loading.adapted_tensors import on_text_model
from bulkrun.models.loading.adapter import LowRank
from bulkrun.models.loading.any_weights import AnyScale, AnyWeights, any_weights
from bulkrun.models.loading.dummy_weights import fill_with_random_weights
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.narrow_weights import hold_in_bfloat16
from bulkrun.models.loading.projection_forms import form_projections
from bulkrun.models.loading.quantization import refuse_quantization, store_quantized, warn_of_slow_products
from bulkrun.models.loading.stored_weights import checked_tensors, has_own_head, text_tensors
from bulkrun.models.loading.target import Target
from bulkrun.models.loading.tensor_names import EMBEDDING, HEAD, OF_HEADS, targets
from bulkrun.models.loading.weights_fit import does_not_fit, refuse_beyond_ram

_Stored = AnyScale | LowRank  # what a tensor is dequantized with, or what is added to it
_HUGE_PAGE_BYTES = 2 * 2**20


def load_model(
    path: Path | str, options: LoadOptions, *, config: ModelConfig | None = None, has_head: bool = True
) -> LanguageModel:
    """Build the model of a directory and fill its weights.

    `config`: as it was read from there; None: read it. Without `has_head`, which is for the decoder's families, there
    are hidden states alone, whether files have a head or not. A `deterministic` model is made batch-invariant
    (`models.decoder.invariant`). Raises ModelError for an unsupported model, for pickle weights, for torn files, for
    tensors that are missing, unexpected or of another shape than config.json says, and for an adapter that does not
    fit; UsageError for a device that cannot do what was asked.
    """
    path, deterministic = Path(path), options.deterministic
    config = config or ModelConfig.from_dir(path)
    if options.quantization is not None:
        refuse_quantization(config, options.device, options.quantization)
    if deterministic:
        refuse_invariance(config, options.device, options.quantization)
    files = None if options.load_format == "dummy" else weight_files(path)
    if not isinstance(config, DecoderConfig):
        assert has_head, "hidden states alone come from the decoder"
        from bulkrun.models.loading.general_loader import load_general_model  # transformers takes seconds to import

        return load_general_model(path, config, files or [], options)
    model = _load_decoder(path, config, files, options, has_head=has_head)
    model.pack_weights(quantized_alone=deterministic)
    warn_of_slow_products(model)
    if deterministic:
        return make_invariant(model.eval())
    model.layer_stack = compile_layers(model)
    return model.eval()


def _load_decoder(
    path: Path, config: DecoderConfig, files: list[Path] | None, options: LoadOptions, *, has_head: bool
) -> Decoder:
    """The decoder with the files' weights or, without files, random ones."""
    dtype, adapter = options.dtype, options.adapter
    tensors = text_tensors(files or [], config.architecture, is_tied=config.tie_word_embeddings)
    if not has_head:  # as if it were tied, and then without
        config = dataclasses.replace(config, tie_word_embeddings=True)
        tensors = {name: stored for name, stored in tensors.items() if not name.startswith(OF_HEADS)}
    if adapter is not None:
        adapter, tensors, config = on_text_model(adapter, tensors, config, has_head=has_head)
    weights = any_weights(tensors, config.stored_quantization, path)
    added = {} if adapter is None else adapter.added
    is_apart = HEAD in weights.scales or bool(HEAD in tensors and added.keys() & {EMBEDDING, HEAD})
    if config.tie_word_embeddings and (is_apart or has_own_head(tensors, dtype)):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    model = _without_memory(config, dtype, has_head=has_head)
    scales: dict[str, AnyScale] = {**weights.read_scales(weights.scales)}
    can_quantize = form_projections(model, weights, scales, options)
    hold_in_bfloat16(model, weights, scales.keys() | added.keys(), options)
    _take_memory(model, options.device, can_quantize=can_quantize)
    if files is None:
        fill_with_random_weights(model)
    else:
        _fill(model, weights, {**scales, **added}, path, pack=not options.deterministic)
    return model


def _without_memory(config: DecoderConfig, dtype: torch.dtype, *, has_head: bool) -> Decoder:
    """The decoder as sizes alone."""
    with torch.device("meta"):
        model = Decoder(config)
    if not has_head:
        model.drop_head()
    model.cast(dtype)
    return model


def _take_memory(model: Decoder, device: torch.device, *, can_quantize: bool) -> None:
    """Put the decoder on its device, with whatever the memory held as weights."""
    num_bytes = sum(tensor.nbytes for tensor in {*model.parameters(), *model.buffers()})
    is_copied = model.config.tie_word_embeddings and isinstance(model.lm_head, Linear)
    copied_bytes = model.embed_weight.nbytes if is_copied else 0  # a packed head, beside it
    refuse_beyond_ram(num_bytes + copied_bytes, device, can_quantize=can_quantize)
    try:
        # what `to_empty` does, but its `empty_like` of a meta tensor imports sympy: a quarter of a second
        model._apply(lambda tensor: _empty(tensor, device))  # type: ignore[no-untyped-call]
    except (torch.OutOfMemoryError, OSError) as error:
        raise does_not_fit(num_bytes, device, first_line(error), can_quantize=can_quantize) from None
    if not model.config.norm_weights:
        fill_norms(model)
    model.inv_freqs = {rope: inv_freq.to(device) for rope, inv_freq in model.inv_freqs.items()}
    model.tie_weights()


def _empty(like: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """In huge pages where they are worth it: clearing small ones takes longer than a fast disk needs to fill them."""
    if torch.device(device).type == "cpu" and like.nbytes >= _HUGE_PAGE_BYTES:
        return untouched_zeros(like.shape, like.dtype, huge_pages=True)
    return torch.empty(like.shape, dtype=like.dtype, device=device)


def _fill(model: Decoder, weights: AnyWeights, how: dict[str, _Stored], path: Path, *, pack: bool) -> None:
    """Read every tensor to its place, some by `how` they are stored or what is added to them; `pack` each matrix as
    soon as it is whole, while the next ones are read."""
    wanted = dict(targets(model, weights.tensors))
    stored = checked_tensors(wanted, weights.tensors, weights.scales, model.config, path)
    unfilled = Counter(_memory(target.view) for target in wanted.values())
    packers = _packers(model) if pack else {}
    is_on_host = model.device.type == "cpu"

    def place(one: StoredTensor) -> torch.Tensor | None:
        target = wanted[one.name]
        takes_bytes = target.view.dtype == one.dtype and target.view.shape == one.shape and target.scale is None
        is_plain = target.view.is_contiguous() and target.order is None
        return target.view if is_on_host and takes_bytes and is_plain else None

    for one, tensor in read_tensors([weights.in_file(one) for one in stored], place, pinned=not is_on_host):
        target = wanted.pop(one.name)
        _store(tensor, how.pop(one.name, None), target)
        memory = _memory(target.view)
        unfilled[memory] -= 1
        if not unfilled[memory] and memory in packers:
            packers[memory]()
    if not is_on_host:
        release_pinned(model.device)


def _packers(model: Decoder) -> dict[int, Callable[[], None]]:
    """The function that lays each matrix out, by the matrix's memory."""
    matrices = [module for module in model.modules() if isinstance(module, Linear | ExpertLinear | QuantizedLinear)]
    return {_memory(module.weight): module.pack for module in matrices}


def _memory(tensor: torch.Tensor) -> int:
    """The memory that the parts of a fused matrix share, as a key."""
    return tensor.untyped_storage().data_ptr()


def _store(tensor: torch.Tensor, how: _Stored | None, target: Target) -> None:
    if how is not None:
        how.store(tensor, target)
        return
    tensor = target.ordered(tensor)
    if target.scale is not None:
        store_quantized(tensor.view(target.view.shape), target.view, target.scale)
        return
    if tensor is not target.view:
        same_numbers = tensor.numel() == target.view.numel()
        target.view.copy_(tensor.view(target.view.shape) if same_numbers else tensor, non_blocking=True)
    if target.offset:
        target.view.add_(target.offset)
