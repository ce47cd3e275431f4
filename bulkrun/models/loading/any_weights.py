"""A checkpoint's tensors sorted into weights and what belongs to them, in whatever way they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bulkrun.models.config.mxfp4_quantization import Mxfp4Quantization
from bulkrun.models.config.packed_quantization import PackedQuantization
from bulkrun.models.config.stored_quantization import Quantized
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.mxfp4_weights import Mxfp4Scale, Mxfp4Weights, mxfp4_weights
from bulkrun.models.loading.packed_scale import PackedScale
from bulkrun.models.loading.packed_weights import PackedWeights, packed_weights
from bulkrun.models.loading.stored_quantized import StoredScale, StoredWeights, with_scales

AnyWeights = StoredWeights | PackedWeights | Mxfp4Weights
AnyScale = StoredScale | PackedScale | Mxfp4Scale


def any_weights(tensors: Mapping[str, StoredTensor], stored: Quantized | None, path: Path) -> AnyWeights:
    """Sort them; `stored` is what config.json says. Raises ModelError where the two contradict each other."""
    if isinstance(stored, Mxfp4Quantization):
        return mxfp4_weights(tensors, path)
    if isinstance(stored, PackedQuantization):
        return packed_weights(tensors, stored, path)
    return with_scales(tensors, stored, path)
