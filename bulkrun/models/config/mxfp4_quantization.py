"""What config.json says of experts stored in MXFP4, as gpt-oss is published: four bits, and an exponent for 32 of them.

Torch-free. Format: OCP Microscaling Formats (MX) 1.0; where the tensors lie: `loading.mxfp4_weights`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bulkrun.models.config.four_bits import FourBitScheme
from bulkrun.models.config.quantization_config import refused

METHOD = "mxfp4"
BLOCK = 32  # numbers that share an exponent
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
CODEBOOK = (*_MAGNITUDES, *(-x for x in _MAGNITUDES))  # E2M1: a sign, two bits of exponent, one of mantissa
_FOUR_BITS = FourBitScheme(CODEBOOK, BLOCK, has_zeros=False, are_powers=True)
_MODEL_TYPE, _ARCHITECTURE = "gpt_oss", "GptOssForCausalLM"


@dataclass(frozen=True, slots=True)
class Mxfp4Quantization:
    """Experts' weights in MXFP4; there is nothing else to say."""

    method: str = METHOD
    summary: str = f"4 bits ({METHOD}, blocks of {BLOCK})"
    four_bits: FourBitScheme = _FOUR_BITS


def of_mxfp4(raw: Mapping[str, Any]) -> Mxfp4Quantization:
    """Read a parsed config.json. Raises ModelError for models other than gpt-oss, whose tensors have other names."""
    if raw.get("model_type") != _MODEL_TYPE and _ARCHITECTURE not in (raw.get("architectures") or ()):
        raise refused(METHOD, "in models other than gpt-oss")
    return Mxfp4Quantization()
