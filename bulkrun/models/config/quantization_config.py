"""Where a parsed config.json speaks of quantized weights, and the error for those that cannot be read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError

CT = "compressed-tensors"
_KEYS = ("quantization_config", "compression_config", "quantization")  # the last is MLX's
_FIX = (
    "use the model's bfloat16, float16 or float32 checkpoint, or one in fp8 (quant_method compressed-tensors in "
    "format float-quantized, fp8 or fbgemm_fp8), int8 (compressed-tensors in format int-quantized) or 4 bits (gptq, "
    "awq, compressed-tensors in format pack-quantized)"
)


def quantization_config(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What is said of quantized weights; None: nothing. Raises ModelError where it is no object."""
    found = next((raw[key] for key in _KEYS if raw.get(key)), None)
    if found is not None and not isinstance(found, Mapping):
        raise refused(found)
    return found


def refused(method: object, how: str = "") -> ModelError:
    """The error for weights of a quant_method, or for one that is read, but not `how`."""
    what = f"weights quantized with {method}" if method else "quantized weights"
    return ModelError(f"{what} are not supported{how and ' '}{how}; {_FIX}")
