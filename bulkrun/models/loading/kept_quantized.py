"""Which stored weights of 8 bits stay so where the user asks for nothing.

They do where the device multiplies their type fast and the checkpoint quantizes as our products do: a scale per output
channel (or fewer), inputs in 8 bits. Products in fp8 depend on the batch, so a deterministic run has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.mxfp4_quantization import Mxfp4Quantization
from bulkrun.models.config.stored_quantization import StoredQuantization
from bulkrun.models.loading.any_weights import AnyWeights
from bulkrun.models.loading.expert_names import expert_modules
from bulkrun.ops.cpu.int8_linear import can_pack_int8
from bulkrun.ops.matmul.fp8 import can_multiply_fp8
from bulkrun.settings import Quantization

# each projection's parts in a checkpoint: those that are fused here, and what has them fused already
_PARTS = {
    "attention.qkv_proj": (
        "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj",
        "self_attn.gate_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa",
        "mixer.q_proj", "mixer.k_proj", "mixer.v_proj",
    ),
    "attention.q_b_proj": ("self_attn.q_b_proj",),
    "attention.qkvz_proj": (
        "linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.in_proj_qkvz",
        "linear_attn.q_proj", "linear_attn.k_proj", "linear_attn.v_proj", "linear_attn.g_proj",
    ),
    "attention.in_proj": ("conv.in_proj", "mamba.in_proj", "mixer.in_proj"),
    "attention.o_proj": (
        "self_attn.o_proj", "linear_attn.out_proj", "linear_attn.o_proj", "conv.out_proj", "mamba.out_proj",
        "mixer.o_proj", "mixer.out_proj",
    ),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj", "mlp.gate_up_proj", "shared_mlp.gate_up_proj"),
    "mlp.up_proj": ("mlp.up_proj", "mixer.up_proj"),
    "mlp.down_proj": ("mlp.down_proj", "shared_mlp.down_proj", "mixer.down_proj"),
    "mlp.dense.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.dense.down_proj": ("mlp.down_proj",),
    "mlp.shared.mlp.gate_up_proj": (
        "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "shared_mlp.gate_up_proj",
        "mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj",
        "mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj",
    ),
    "mlp.shared.mlp.up_proj": ("mixer.shared_experts.up_proj",),
    "mlp.shared.mlp.down_proj": (
        "mlp.shared_expert.down_proj", "shared_mlp.down_proj", "mlp.shared_experts.down_proj",
        "mlp.shared_mlp.down_proj", "mixer.shared_experts.down_proj",
    ),
}  # fmt: skip
_OF_EXPERTS = ("mlp.gate_up_proj", "mlp.down_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def kept_quantization(config: ModelConfig, device: torch.device, *, deterministic: bool) -> Quantization | None:
    """What stored weights are multiplied in as they are, if engine.quantization is not set; None: none are."""
    if not isinstance(config, DecoderConfig) or not isinstance(config.stored_quantization, StoredQuantization):
        return None
    stored = config.stored_quantization
    is_ours = stored.block_size is None and stored.quantizes_inputs
    if not is_ours or (deterministic and stored.kind == "fp8"):
        return None
    return stored.kind if stored.kind == fast_quantization(config, device) else None


def kept_projections(config: DecoderConfig, weights: AnyWeights) -> Callable[[int, str], bool]:
    """Whether a layer's projection, such as mlp.down_proj, is stored quantized with all its parts.

    Without tensors config.json tells.
    """
    stored = config.stored_quantization

    def is_plain(module: str) -> bool:
        if not weights.tensors:
            return isinstance(stored, StoredQuantization) and not stored.quantizes(module)
        return f"{module}.weight" in weights.tensors and f"{module}.weight" not in weights.scales

    def is_chosen(layer: int, name: str) -> bool:
        is_sparse = config.moe is not None and config.moe.sparse_layers[layer]
        are_experts = is_sparse and name in _OF_EXPERTS
        if isinstance(stored, Mxfp4Quantization):
            return are_experts
        parts: Collection[str] = expert_modules(config) if are_experts else _PARTS[name]
        return bool(parts) and not any(is_plain(f"model.layers.{layer}.{part}") for part in parts)

    return is_chosen


def fast_quantization(config: DecoderConfig, device: torch.device) -> Quantization | None:
    """The type of 8 bits that the device multiplies such projections fast in; the first call may compile."""
    if device.type != "cpu":
        return "fp8" if can_multiply_fp8(device) else None
    return "int8" if all(can_pack_int8(*shape) for shape in _shapes(config)) else None


def _shapes(config: DecoderConfig) -> list[tuple[int, int]]:
    """Outputs and inputs of all kinds of projections."""
    hidden, inner_sizes = config.hidden_size, {config.mlp_size(layer) for layer in range(config.num_layers)}
    if config.moe is not None:
        is_dense = config.moe.beside_mlp or not all(config.moe.sparse_layers)
        inner_sizes = (inner_sizes if is_dense else set()) | {config.moe.intermediate_size}
        inner_sizes |= set() if config.moe.shared_size is None else {config.moe.shared_size}
    shapes = [] if config.latent is None else config.latent.projection_shapes(hidden, config.num_heads)
    for layer, kv in enumerate(config.layers_kv if config.latent is None else ()):
        q_size, num_kinds = config.num_heads * kv.head_dim, 2 if config.gates_attention else 1
        shapes += [(num_kinds * q_size + (2 * kv.size if kv.source == layer else 0), hidden), (hidden, q_size)]
    if config.recurrence is not None:
        shapes += config.recurrence.projection_shapes(hidden)
    num_ups = 2 if config.has_mlp_gates else 1
    return shapes + [shape for inner in inner_sizes for shape in ((num_ups * inner, hidden), (hidden, inner))]
