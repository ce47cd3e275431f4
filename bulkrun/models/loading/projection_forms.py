"""In what form a model's projections are held: as the user asks, else as stored where that is fast, else plain.

Decided before any memory is taken. What stays as it is stored: `kept_quantized`, `kept_four_bits`; how plain matrices
are exchanged for quantized ones: `quantization`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.stored_quantization import Quantized, StoredQuantization
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.loading.any_weights import AnyScale, AnyWeights
from bulkrun.models.loading.dtypes import cpu_multiplies_bfloat16
from bulkrun.models.loading.kept_four_bits import four_bits_to_keep, keep_four_bits, keeping_pays
from bulkrun.models.loading.kept_quantized import fast_quantization, kept_projections, kept_quantization
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.loading.quantization import quantize_projections
from bulkrun.settings import Quantization


def form_projections(model: Decoder, weights: AnyWeights, scales: Mapping[str, AnyScale], options: LoadOptions) -> bool:
    """Exchange a model's projections, which have no memory yet, for those that are held, and say it in the log.

    `scales` are all that the checkpoint has. Returns whether engine.quantization, which was not asked for, could make
    them smaller.
    """
    config, quantization = model.config, options.quantization
    is_stored_so = kept_projections(config, weights)
    in_four_bits = _keep_four_bits(model, scales, options, is_stored_so)
    kept = None
    if quantization is not None:
        quantize_projections(model, quantization, None)
    elif (kept := kept_quantization(config, options.device, deterministic=options.deterministic)) is not None:
        quantize_projections(model, kept, is_stored_so)
    if config.stored_quantization is not None:
        _say_how_weights_run(config, weights, options, kept, in_four_bits=in_four_bits)
    return quantization is None and kept is None and not in_four_bits


def _keep_four_bits(
    model: Decoder, scales: Mapping[str, AnyScale], options: LoadOptions, is_stored_so: Callable[[int, str], bool]
) -> bool:
    if options.deterministic and options.device.type != "cpu":
        return False  # what is unpacked there goes through the device's own product, whose sums depend on the batch
    scheme = four_bits_to_keep(model.config.stored_quantization, scales)
    return scheme is not None and keeping_pays(model, options) and keep_four_bits(model, scheme, is_stored_so, options)


def _say_how_weights_run(
    config: DecoderConfig, weights: AnyWeights, options: LoadOptions, kept: Quantization | None, *, in_four_bits: bool
) -> None:
    """One line on what is done with weights stored quantized, and one on scales that are not used."""
    stored = config.stored_quantization
    assert stored is not None, "there is nothing to say of plain ones"
    log = logging.getLogger(__name__)
    if in_four_bits:
        to = options.quantization or str(options.dtype).removeprefix("torch.")
        how = f"they stay so in memory, and are unpacked to {to} as they are multiplied"
        if options.quantization is None and fast_quantization(config, options.device) == "int8":
            how += " (engine.quantization: int8 is faster, at some loss of quality)"
    elif kept is not None or _are_kept_rows(stored, options.quantization):
        how = "they are multiplied in 8 bits as they are"
    elif options.quantization is not None:
        how = f"they are quantized anew, to {options.quantization} with a scale per output channel"
    else:
        how = f"they are dequantized and take the memory of {str(options.dtype).removeprefix('torch.')}"
        how += _instead(fast_quantization(config, options.device))
    if config.dtype == "float16" and options.dtype == torch.float32 and cpu_multiplies_bfloat16():
        how += "; float16 becomes float32 on a CPU, engine.dtype: bfloat16 is faster"
    log.warning("the model's weights are stored in %s; %s", stored.summary, how)
    if weights.has_cache_scales:
        log.warning("its scales for keys and values (k_scale, v_scale) are not used, whatever engine.kv_cache_dtype is")


def _are_kept_rows(stored: Quantized, quantization: Quantization | None) -> bool:
    """Whether what is asked for is how they are stored."""
    return isinstance(stored, StoredQuantization) and stored.block_size is None and stored.kind == quantization


def _instead(fast: Quantization | None) -> str:
    """What a user could ask for."""
    if fast is None:
        return ""
    but = "; not with deterministic" if fast == "fp8" else ""
    return f" (engine.quantization: {fast} keeps 8 bits, with a scale per output channel{but})"
