"""What config.json says of weights that are stored several to a word of 32 bits: GPTQ, AWQ, compressed-tensors.

Torch-free. Which weights are packed their tensors tell (`loading.packed_weights`); here stands how they are meant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bulkrun.models.config.four_bits import MAX_BITS, WHOLE_NUMBERS, FourBitScheme
from bulkrun.models.config.quantization_config import CT, refused

Layout = Literal["gptq", "awq", "compressed"]

_WHOLE = -1  # a group size that means all inputs
_GPTQ_BITS = (2, 3, 4, 8)
_CT_BITS = (2, 4, 8)  # 3 were padded to words once, and are no longer
_GPTQ_FORMATS = {None: 1, "gptq": 1, "gptq_v2": 0}  # and what they store their zero points without


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedQuantization:
    """How a checkpoint's packed weights are meant: (number - zero point) * scale, both of a group of inputs."""

    method: str  # quant_method, for people
    layout: Layout
    num_bits: int
    group_size: int | None  # inputs that share a scale; None: all, or all of the weight
    has_zeros: bool = True  # False: a weight without zero points lies around the middle of its range
    zero_offset: int = 0  # added to a stored zero point

    @property
    def four_bits(self) -> FourBitScheme | None:
        """How they are multiplied as they are stored; None: they have more bits."""
        if self.num_bits > MAX_BITS:
            return None
        return FourBitScheme(WHOLE_NUMBERS, self.group_size, has_zeros=True)

    @property
    def summary(self) -> str:
        """For people, such as `4 bits (gptq, groups of 128)`."""
        groups = "" if self.group_size is None else f", groups of {self.group_size}"
        return f"{self.num_bits} bits ({self.method}{groups})"


def of_gptq(found: Mapping[str, Any]) -> PackedQuantization:
    """GPTQ as AutoGPTQ and GPTQModel write it. Raises ModelError for what kernels have laid out anew."""
    layout = _layout(found, "checkpoint_format")
    if layout not in _GPTQ_FORMATS or found.get("is_marlin_format"):
        raise refused("gptq", f"in checkpoint_format {layout if layout not in _GPTQ_FORMATS else 'marlin'}")
    if found.get("pack_dtype") not in (None, "int32"):
        raise refused("gptq", f"packed in {found['pack_dtype']}")
    for rule, changes in (found.get("dynamic") or {}).items():
        if {"bits", "group_size"} & set(changes or ()):
            raise refused("gptq", f"with another number of bits or group size for some modules (dynamic: {rule})")
    return PackedQuantization(
        method="gptq",
        layout="gptq",
        num_bits=_num_bits("gptq", found.get("bits"), _GPTQ_BITS),
        group_size=_group_size("gptq", found.get("group_size")),
        zero_offset=_GPTQ_FORMATS[layout],
    )


def of_awq(found: Mapping[str, Any]) -> PackedQuantization:
    """AWQ as AutoAWQ writes it for its matrix-matrix kernel. Raises ModelError for its other layouts."""
    version = _layout(found, "version") or "gemm"
    if version != "gemm":
        raise refused("awq", f"in version {version}")
    return PackedQuantization(
        method="awq",
        layout="awq",
        num_bits=_num_bits("awq", found.get("bits", found.get("w_bit")), (4,)),
        group_size=_group_size("awq", found.get("group_size", found.get("q_group_size"))),
    )


def of_pack_quantized(groups: Sequence[Mapping[str, Any]]) -> PackedQuantization:
    """The format pack-quantized of compressed-tensors. Its config_groups may differ in their targets alone."""
    schemes = [_of_group(group) for group in groups]
    if any(scheme != schemes[0] for scheme in schemes):
        raise refused(CT, "with config_groups of different bits or group sizes")
    return schemes[0]


def _of_group(group: Mapping[str, Any]) -> PackedQuantization:
    weights = group["weights"]
    if weights.get("type") != "int":
        raise refused(CT, f"in format pack-quantized with weights of type {weights.get('type')}")
    if group.get("output_activations"):
        raise refused(CT, "with quantized outputs")
    strategy = weights.get("strategy") or ("tensor" if weights.get("group_size") is None else "group")
    if strategy not in ("tensor", "channel", "group"):
        raise refused(CT, f"in format pack-quantized with strategy {strategy}")
    return PackedQuantization(
        method=CT,
        layout="compressed",
        num_bits=_num_bits(CT, weights.get("num_bits"), _CT_BITS),
        group_size=_group_size(CT, weights.get("group_size")) if strategy == "group" else None,
        has_zeros=not weights.get("symmetric", True),
    )


def _layout(found: Mapping[str, Any], key: str) -> str | None:
    """How words are laid out: by the key of the format's first writers, or by what transformers 5 calls it."""
    name = found.get(key) or found.get("format")
    return None if name is None else str(name).lower()


def _num_bits(method: str, given: Any, known: tuple[int, ...]) -> int:
    if given not in known or isinstance(given, bool):
        raise refused(method, f"with {given!r} bits")
    return int(given)


def _group_size(method: str, given: Any) -> int | None:
    """Raises ModelError for what is no number of inputs."""
    if not isinstance(given, int) or isinstance(given, bool) or (given != _WHOLE and given < 1):
        raise refused(method, f"with group_size {given!r}")
    return None if given == _WHOLE else given
