"""Tensor names of several residual streams and of what each layer does with them, and where each goes."""

from __future__ import annotations

from collections.abc import Iterator

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.altup_layer import AltUpLayer
from bulkrun.models.decoder.residual_streams import ResidualStreams
from bulkrun.models.loading.target import Target, parts_of, whole


def stream_targets(streams: ResidualStreams, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    """Those that all layers have in common."""
    others = range(streams.num_others)
    yield from parts_of("model.altup_projections.", streams.projection, {str(n): config.hidden_size for n in others})
    for n, linear in enumerate(streams.unembed):
        yield f"model.altup_unembed_projections.{n}.weight", whole(linear.weight)


def altup_targets(prefix: str, layer: AltUpLayer) -> Iterator[tuple[str, Target]]:
    """Those of a layer."""
    altup, laurel = layer.altup, layer.laurel
    for name, parameter in {
        "altup.correct_output_scale": altup.output_scale,
        "altup.correction_coefs.weight": altup.correction,
        "altup.prediction_coefs.weight": altup.prediction,
        "altup.modality_router.weight": altup.router.weight,
        "altup.router_norm.weight": altup.router_norm.weight,
        "laurel.linear_left.weight": laurel.left_proj.weight,
        "laurel.linear_right.weight": laurel.right_proj.weight,
        "laurel.post_laurel_norm.weight": laurel.norm.weight,
    }.items():
        yield prefix + name, whole(parameter)
