"""Which stored fp8 weights stay in 8 bits where the user asks for nothing, and what the log says of it.

They do where the device multiplies fp8 and the checkpoint quantizes as our products do: a scale per output channel (or
fewer), inputs in 8 bits. Such products depend on the batch, so a deterministic run has none of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.loading.stored_fp8 import StoredWeights
from bulkrun.ops.fp8 import can_multiply_fp8

# each projection's parts in a checkpoint: those that are fused here, and what has them fused already
_PARTS = {
    "attention.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj"),
    "attention.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def keeps_fp8(config: ModelConfig, device: torch.device, *, deterministic: bool) -> bool:
    """Whether weights stored in fp8 are multiplied as they are, if engine.quantization is not set."""
    if not isinstance(config, DecoderConfig) or config.stored_fp8 is None:
        return False
    is_ours = config.stored_fp8.block_size is None and config.stored_fp8.quantizes_inputs and config.moe is None
    return is_ours and not deterministic and _has_fp8_units(device)


def kept_projections(config: DecoderConfig, weights: StoredWeights) -> Callable[[int, str], bool]:
    """Whether a layer's projection, such as mlp.down_proj, is stored in fp8 with all its parts.

    Without tensors config.json tells.
    """
    stored = config.stored_fp8
    assert stored is not None, "asked of checkpoints in fp8"

    def is_plain(module: str) -> bool:
        if not weights.tensors:
            return not stored.quantizes(module)
        return f"{module}.weight" in weights.tensors and f"{module}.weight" not in weights.scales

    return lambda layer, name: not any(is_plain(f"model.layers.{layer}.{part}") for part in _PARTS[name])


def say_how_fp8_runs(
    config: DecoderConfig, weights: StoredWeights, dtype: torch.dtype, device: torch.device, quantization: str | None,
    *, is_kept: bool,
) -> None:  # fmt: skip
    """One line on what is done with weights stored in fp8, and one on scales that are not used; none for others."""
    if config.stored_fp8 is None:
        return
    block = config.stored_fp8.block_size
    what = f"the model's weights are stored in fp8 ({config.stored_fp8.method}{'' if block is None else ', in blocks'})"
    if is_kept or (quantization == "fp8" and block is None):
        how = "they are multiplied in 8 bits as they are"
    elif quantization is not None:
        how = f"they are quantized anew, to {quantization} with a scale per output channel"
    else:
        how = f"they are dequantized and take the memory of {str(dtype).removeprefix('torch.')}"
        if config.moe is None and _has_fp8_units(device):
            how += " (engine.quantization: fp8 keeps 8 bits, with a scale per output channel; not with deterministic)"
    log = logging.getLogger(__name__)
    log.warning("%s; %s", what, how)
    if weights.has_cache_scales:
        log.warning("its scales for keys and values (k_scale, v_scale) are not used, whatever engine.kv_cache_dtype is")


def _has_fp8_units(device: torch.device) -> bool:
    return device.type != "cpu" and can_multiply_fp8(device)
