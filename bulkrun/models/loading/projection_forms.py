"""In what form a model's projections are held: as the user asks, else as stored where that is fast, else plain.

Decided before any memory is taken. What stays as it is stored: `kept_quantized`, `kept_four_bits`; how plain matrices
are exchanged for quantized ones: `quantization`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.stored_quantization import Quantized, StoredQuantization
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.loading.any_weights import AnyScale, AnyWeights
from bulkrun.models.loading.dtypes import cpu_multiplies_bfloat16
from bulkrun.models.loading.kept_four_bits import four_bits_to_keep, keep_four_bits, keeping_pays
from bulkrun.models.loading.kept_quantized import fast_quantization, kept_projections, kept_quantization
from bulkrun.models.loading.quantization import quantize_projections
from bulkrun.settings import Quantization


@dataclass(frozen=True, slots=True)
class Forms:
    """What the choice depends on."""

    weights: AnyWeights
    scales: Mapping[str, AnyScale]  # all that the checkpoint has
    dtype: torch.dtype
    device: torch.device
    quantization: Quantization | None  # what the user asks for
    deterministic: bool


def form_projections(model: Decoder, forms: Forms) -> bool:
    """Exchange a model's projections, which have no memory yet, for those that are held, and say it in the log.

    Returns whether engine.quantization, which was not asked for, could make them smaller.
    """
    config, device, quantization = model.config, forms.device, forms.quantization
    is_stored_so = kept_projections(config, forms.weights)
    in_four_bits = _keep_four_bits(model, forms, is_stored_so)
    kept = None
    if quantization is not None:
        quantize_projections(model, quantization, None)
    elif (kept := kept_quantization(config, device, deterministic=forms.deterministic)) is not None:
        quantize_projections(model, kept, is_stored_so)
    if config.stored_quantization is not None:
        _say_how_weights_run(config, forms, kept, in_four_bits=in_four_bits)
    return quantization is None and kept is None and not in_four_bits


def _keep_four_bits(model: Decoder, forms: Forms, is_stored_so: Callable[[int, str], bool]) -> bool:
    dtype, device, quantization = forms.dtype, forms.device, forms.quantization
    if forms.deterministic and device.type != "cpu":
        return False  # what is unpacked there goes through the device's own product, whose sums depend on the batch
    meant = four_bits_to_keep(model.config.stored_quantization, forms.scales)
    if meant is None or not keeping_pays(model, dtype, device, quantization):
        return False
    return keep_four_bits(model, meant, is_stored_so, dtype, device, in_int8=quantization == "int8")


def _say_how_weights_run(config: DecoderConfig, forms: Forms, kept: Quantization | None, *, in_four_bits: bool) -> None:
    """One line on what is done with weights stored quantized, and one on scales that are not used."""
    stored = config.stored_quantization
    assert stored is not None, "there is nothing to say of plain ones"
    log = logging.getLogger(__name__)
    if in_four_bits:
        to = forms.quantization or str(forms.dtype).removeprefix("torch.")
        how = f"they stay so in memory, and are unpacked to {to} as they are multiplied"
        if forms.quantization is None and fast_quantization(config, forms.device) == "int8":
            how += " (engine.quantization: int8 is faster, at some loss of quality)"
    elif kept is not None or _are_kept_rows(stored, forms.quantization):
        how = "they are multiplied in 8 bits as they are"
    elif forms.quantization is not None:
        how = f"they are quantized anew, to {forms.quantization} with a scale per output channel"
    else:
        how = f"they are dequantized and take the memory of {str(forms.dtype).removeprefix('torch.')}"
        how += _instead(fast_quantization(config, forms.device))
    if config.dtype == "float16" and forms.dtype == torch.float32 and cpu_multiplies_bfloat16():
        how += "; float16 becomes float32 on a CPU, engine.dtype: bfloat16 is faster"
    log.warning("the model's weights are stored in %s; %s", stored.summary, how)
    if forms.weights.has_cache_scales:
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
