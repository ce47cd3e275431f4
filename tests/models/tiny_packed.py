"""Tiny checkpoints as the hub has them in GPTQ, AWQ and compressed-tensors' pack-quantized, and what they stand for.

Rounded and packed here number by number, from what the formats' own writers do; no code of bulkrun's is used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from tests.models.tiny_models import save_tiny_model
from tests.models.tiny_quantized import save_converted

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight columns lies in which place, the lowest bits first


class Packed(NamedTuple):
    """A way to pack weights, and what config.json says of it."""

    layout: Literal["gptq", "awq", "ct"]
    num_bits: int = 4
    group_size: int = 24  # -1: all inputs
    symmetric: bool = False
    shuffled: bool = False  # inputs are in groups by what they did, not by where they are
    config: dict[str, Any] = {}  # noqa: RUF012 - never changed
    old_zeros: bool = False  # compressed-tensors' of before it packed them
    one_scale: bool = False
    left_out: str = "lm_head"


PACKED = {
    "gptq": Packed("gptq"),
    "gptq_act_order": Packed("gptq", group_size=16, shuffled=True, config={"checkpoint_format": "gptq_v2"}),
    "gptq_8_bits": Packed("gptq", 8, -1, symmetric=True, config={"checkpoint_format": "gptq"}),
    "gptq_2_bits": Packed("gptq", 2, 16),
    "gptq_3_bits": Packed("gptq", 3, 32),
    "awq": Packed("awq"),
    "awq_whole": Packed("awq", group_size=-1, config={"version": "GEMM"}, left_out="layers.1.self_attn.o_proj"),
    "ct_group": Packed("ct", symmetric=True, left_out="layers.1.self_attn.o_proj"),
    "ct_zeros": Packed("ct", group_size=16),
    "ct_old_zeros": Packed("ct", old_zeros=True),
    "ct_8_bits": Packed("ct", 8, -1, symmetric=True),
    "ct_8_bits_zeros": Packed("ct", 8, -1),
    "ct_8_bits_old_zeros": Packed("ct", 8, -1, old_zeros=True),
    "ct_one_scale": Packed("ct", group_size=-1, symmetric=True, one_scale=True),
    "ct_act_order": Packed("ct", group_size=16, symmetric=True, shuffled=True),
    "ct_2_bits": Packed("ct", 2, 24),
}
_WHOLE_WORDS = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}


def save_tiny_packed(path: Path, variant: str, name: str, **overrides: Any) -> tuple[Path, Path]:
    """Write a variant in one of PACKED and, dequantized in float32, as an ordinary checkpoint: (packed, ordinary)."""
    form = PACKED[name]
    if form.layout == "gptq" and form.num_bits < 4:
        overrides = {**_WHOLE_WORDS, **overrides}  # it has no others
    plain = save_tiny_model(path / "plain", variant, **overrides)
    generator = np.random.default_rng(3)
    stored = save_converted(
        plain, path / "stored", quantization_config(form), lambda weight: pack(weight, form, generator), form.left_out
    )
    return stored, plain


def quantization_config(form: Packed) -> dict[str, Any]:
    """What config.json says of the format."""
    if form.layout == "gptq":
        gptq = {"bits": form.num_bits, "group_size": form.group_size, "sym": form.symmetric, "desc_act": form.shuffled}
        return {"quant_method": "gptq", **gptq, **form.config}
    if form.layout == "awq":
        awq = {"bits": 4, "group_size": form.group_size, "zero_point": True, "version": "gemm"}
        return {"quant_method": "awq", "modules_to_not_convert": None, **awq, **form.config}
    strategy = "tensor" if form.one_scale else "channel" if form.group_size == -1 else "group"
    weights = {"num_bits": form.num_bits, "type": "int", "symmetric": form.symmetric, "strategy": strategy,
               "group_size": None if strategy == "tensor" else form.group_size, "dynamic": False,
               "actorder": "group" if form.shuffled else None}  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed"}  # fmt: skip


def pack(weight: torch.Tensor, form: Packed, generator: np.random.Generator) -> tuple[dict[str, torch.Tensor], Any]:
    """A weight [O, I] as its tensors by the last part of their names, and the numbers that they stand for."""
    w, num_columns = weight.double().numpy(), weight.shape[1]
    group_size = num_columns if form.group_size == -1 else form.group_size
    group_of = np.arange(num_columns) // group_size
    if form.shuffled:
        group_of = generator.permutation(group_of)
    scales, zeros = _grids(w, group_of, form)
    spread_scales, spread_zeros = scales.astype(np.float32)[:, group_of], zeros[:, group_of]
    numbers = np.clip(np.rint(w / spread_scales + spread_zeros), 0, 2**form.num_bits - 1).astype(np.int64)
    back = torch.from_numpy((numbers - spread_zeros).astype(np.float32) * spread_scales)
    parts = _tensors(numbers, scales, zeros, group_of, form)
    return {name: torch.from_numpy(np.ascontiguousarray(part)) for name, part in parts.items()}, back


def _grids(w: np.ndarray, group_of: np.ndarray, form: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Scales, float16 [O, groups], and zero points, int64 of the same shape."""
    top = 2**form.num_bits - 1
    of_groups = [w[:, group_of == group] for group in range(group_of.max() + 1)]
    if form.one_scale:
        of_groups = [np.broadcast_to(w.reshape(1, -1), (len(w), w.size))]
    low = np.stack([np.minimum(part.min(1), 0) for part in of_groups], 1)
    high = np.stack([np.maximum(part.max(1), 0) for part in of_groups], 1)
    if form.symmetric:
        return (np.maximum(high, -low) * 2 / top).astype(np.float16), np.full(low.shape, (top + 1) // 2)
    scales = ((high - low) / top).astype(np.float16)
    return scales, np.clip(np.rint(-low / scales), 0, top).astype(np.int64)


def _tensors(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, group_of: np.ndarray, form: Packed
) -> dict[str, np.ndarray]:
    bits = form.num_bits
    if form.layout == "awq":
        return {
            "qweight": words(numbers.T, bits, AWQ_ORDER),
            "qzeros": words(zeros.T, bits, AWQ_ORDER),
            "scales": scales.T,
        }
    if form.layout == "gptq":
        is_first = form.config.get("checkpoint_format", "gptq") == "gptq"
        stored_zeros = (zeros - is_first) % 2**bits
        return {
            "qweight": words(numbers, bits).T,
            "qzeros": words(stored_zeros.T, bits),
            "scales": scales.T,
            "g_idx": group_of.astype(np.int32),
        }
    parts = {
        "weight_packed": words(numbers, bits),
        "weight_scale": scales[:1, 0] if form.one_scale else scales,
        "weight_shape": np.array(numbers.shape),
    }
    if form.shuffled:
        parts["weight_g_idx"] = group_of.astype(np.int32)
    if form.old_zeros:
        parts["weight_zero_point"] = (zeros - 2 ** (bits - 1)).astype(np.int8)
    elif not form.symmetric:
        parts["weight_zero_point"] = words(zeros.T, bits).T
    return parts


def words(numbers: np.ndarray, num_bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Rows of numbers as int32 words, the last of a row padded with zeros: place i of a word holds number order[i].

    Of 3 bits those that do not fit go on in the next word.
    """
    if num_bits == 3:
        return words_of_3_bits(numbers)
    per_word = 32 // num_bits
    order = order or tuple(range(per_word))
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % per_word)))
    packed = np.zeros((len(padded), padded.shape[1] // per_word), np.uint32)
    for word in range(packed.shape[1]):
        for place, number in enumerate(order):
            packed[:, word] |= padded[:, word * per_word + number].astype(np.uint32) << np.uint32(place * num_bits)
    return packed.view(np.int32)


def words_of_3_bits(numbers: np.ndarray) -> np.ndarray:
    """Rows of numbers as one string of bits, the lowest first, cut into words."""
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % 32)))
    bits = (padded[:, :, None] >> np.arange(3) & 1).reshape(len(padded), -1).astype(np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view("<i4")
