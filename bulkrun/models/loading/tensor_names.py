"""Hugging Face's tensor names of every family, and where each goes in the decoder's fused parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.decoder.altup_layer import AltUpLayer
from bulkrun.models.decoder.attention import Attention
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.decoder_layer import AttentionBesideMamba2, DecoderLayer
from bulkrun.models.decoder.latent_attention import LatentAttention
from bulkrun.models.decoder.layers import MLP, Linear, PlainMLP
from bulkrun.models.decoder.norms import LayerNorm, RMSNorm
from bulkrun.models.decoder.sparse_mlp import DenseBesideExperts, SparseMLP
from bulkrun.models.files.checkpoint import StoredTensor
from bulkrun.models.loading.altup_names import altup_targets, stream_targets
from bulkrun.models.loading.attention_names import attention_targets
from bulkrun.models.loading.expert_names import expert_targets
from bulkrun.models.loading.latent_names import latent_targets
from bulkrun.models.loading.layer_input_names import embedding_targets, layer_input_targets
from bulkrun.models.loading.state_names import state_targets
from bulkrun.models.loading.target import Target, norm_target, parts_of, whole


class _Prefixes(NamedTuple):
    """Of a layer's parts."""

    attention: str = "self_attn."
    mlp: str = "mlp."
    sparse: str = "mlp."
    shared: str = "mlp.shared_expert."
    state: str | None = None  # its kind's own


HEAD_MODULE = "lm_head."
SCORE = "score.weight"  # of decoders that classify
OF_HEADS = (HEAD_MODULE, "score.")  # what is left out where hidden states are wanted alone
EMBEDDING, HEAD, HEAD_BIAS = "model.embed_tokens.weight", f"{HEAD_MODULE}weight", f"{HEAD_MODULE}bias"
_FUSED_GATE_UP = (  # gate and up in one
    "Phi3ForCausalLM", "GraniteMoeHybridForCausalLM", "GraniteMoeSharedForCausalLM", "GraniteMoeSWAForCausalLM",
    "GlmForCausalLM", "Glm4ForCausalLM",
)  # fmt: skip
_SHARED_EXPERTS = _Prefixes(shared="mlp.shared_experts.")
_GRANITE_SHARED = _Prefixes(mlp="shared_mlp.", shared="shared_mlp.")  # beside experts and alone
_MIXERS = _Prefixes(state="mixer.")
_PREFIXES: Mapping[str, _Prefixes] = {
    "AfmoeForCausalLM": _SHARED_EXPERTS,
    "Cohere2MoeForCausalLM": _SHARED_EXPERTS,
    "DeepseekV2ForCausalLM": _SHARED_EXPERTS,
    "DeepseekV3ForCausalLM": _SHARED_EXPERTS,
    "Dots1ForCausalLM": _SHARED_EXPERTS,
    "Ernie4_5_MoeForCausalLM": _SHARED_EXPERTS,
    "ExaoneMoeForCausalLM": _SHARED_EXPERTS,
    "Glm4MoeForCausalLM": _SHARED_EXPERTS,
    "Glm4MoeLiteForCausalLM": _SHARED_EXPERTS,
    "KimiLinearForCausalLM": _SHARED_EXPERTS,
    "Mistral4ForCausalLM": _SHARED_EXPERTS,
    "SolarOpenForCausalLM": _SHARED_EXPERTS,
    "GraniteMoeHybridForCausalLM": _GRANITE_SHARED,
    "GraniteMoeSharedForCausalLM": _GRANITE_SHARED,
    "GraniteMoeSWAForCausalLM": _GRANITE_SHARED,
    "HYV3ForCausalLM": _SHARED_EXPERTS,
    "HunYuanMoEV1ForCausalLM": _Prefixes(shared="mlp.shared_mlp."),
    "FalconMambaForCausalLM": _MIXERS,
    "Mamba2ForCausalLM": _MIXERS,
    "MambaForCausalLM": _MIXERS,
    "NemotronHForCausalLM": _Prefixes("mixer.", "mixer.", "mixer.", "mixer.shared_experts.", "mixer."),
}
_BIASES_IN_A_ROW = ("Ernie4_5_MoeForCausalLM",)  # [1, X], of the choice of experts
_NORM_NAMES: Mapping[str, Mapping[str, str]] = {
    "pre": {"input_layernorm": "input_norm", "post_attention_layernorm": "mlp_norm"},
    "beside": {"input_layernorm": "input_norm"},
    "beside_own": {"input_layernorm": "input_norm", "post_attention_layernorm": "own_norm"},
    "post": {"post_attention_layernorm": "attention_out", "post_feedforward_layernorm": "mlp_out"},
    "sandwich": {
        "input_layernorm": "input_norm",
        "post_attention_layernorm": "attention_out",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out",
    },
}
_NORMS_OF_BOTH = {
    "pre_feedforward_layernorm": "mlp.dense_norm",
    "post_feedforward_layernorm_1": "mlp.dense_out",
    "pre_feedforward_layernorm_2": "mlp.experts_norm",
    "post_feedforward_layernorm_2": "mlp.experts_out",
}


def targets(model: Decoder, stored: Mapping[str, StoredTensor]) -> Iterator[tuple[str, Target]]:
    """Every tensor that a checkpoint of this config must hold, and where it goes.

    `stored` are those it does hold, by name: they tell in which layout it has its experts.
    """
    config = model.config
    yield EMBEDDING, whole(model.embed_weight)
    yield from _norm_parts("model.norm.", model.norm, config)
    if not config.tie_word_embeddings:
        assert isinstance(model.lm_head, Linear), "only a tied head is dropped"
        yield HEAD, whole(model.lm_head.weight)
    if isinstance(model.lm_head, Linear) and model.lm_head.bias is not None:
        yield HEAD_BIAS, whole(model.lm_head.bias)
    if model.layer_inputs is not None:
        yield from embedding_targets(model.layer_inputs)
    if model.streams is not None:
        yield from stream_targets(model.streams, config)
    for i, layer in enumerate(model.layers):
        yield from _layer_targets(f"model.layers.{i}.", layer, config, stored)


def _layer_targets(
    prefix: str, layer: DecoderLayer, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Target]]:
    parts = _PREFIXES.get(config.architecture, _Prefixes())
    yield from _norm_targets(prefix, layer, config)
    yield from layer_input_targets(prefix, layer, config)
    if isinstance(layer, AltUpLayer):
        yield from altup_targets(prefix, layer)
    if isinstance(layer.attention, Attention):
        yield from attention_targets(prefix + parts.attention, layer.attention, config)
    elif isinstance(layer.attention, AttentionBesideMamba2):
        yield from attention_targets(prefix + parts.attention, layer.attention.attention, config)
        yield from state_targets(prefix, parts.state, layer.attention.mamba, config, stored)
    elif isinstance(layer.attention, LatentAttention):
        yield from latent_targets(prefix + parts.attention, layer.attention, config)
    elif layer.attention is not None:
        yield from state_targets(prefix, parts.state, layer.attention, config, stored)
    if isinstance(layer.mlp, DenseBesideExperts):
        yield from _mlp_targets(prefix + parts.mlp, layer.mlp.dense, config)
        yield f"{prefix}mlp.router.scale", norm_target(layer.mlp.router_norm, config)
        yield from _sparse_targets(prefix, parts, layer.mlp.experts, config, stored)
    elif isinstance(layer.mlp, SparseMLP):
        yield from _sparse_targets(prefix, parts, layer.mlp, config, stored)
    elif layer.mlp is not None:
        yield from _mlp_targets(prefix + parts.mlp, layer.mlp, config)


def _norm_targets(prefix: str, layer: DecoderLayer, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    if config.mlp_alone is not None:
        norm = layer.mlp_norm if layer.attention is None else layer.input_norm
        yield from _norm_parts(f"{prefix}norm.", norm, config)
        return
    names = _NORM_NAMES[config.norms_of(layer.layer)]
    if isinstance(layer.mlp, DenseBesideExperts):
        names = {**names, **_NORMS_OF_BOTH}
    for name, module in names.items():
        yield from _norm_parts(f"{prefix}{name}.", layer.get_submodule(module), config)


def _sparse_targets(
    prefix: str, parts: _Prefixes, mlp: SparseMLP, config: DecoderConfig, stored: Mapping[str, StoredTensor]
) -> Iterator[tuple[str, Target]]:
    if mlp.score_bias is not None:
        shape = (1,) * (config.architecture in _BIASES_IN_A_ROW) + (mlp.moe.num_experts,)
        yield f"{prefix}{parts.sparse}expert_bias", Target(mlp.score_bias.data, shape)
    if mlp.expert_scale is not None:
        yield f"{prefix}{parts.sparse}router.per_expert_scale", whole(mlp.expert_scale)
    if mlp.shared is not None:
        yield from _mlp_targets(prefix + parts.shared, mlp.shared.mlp, config)
        if mlp.shared.gate is not None:
            yield f"{prefix}mlp.shared_expert_gate.weight", whole(mlp.shared.gate.weight)
    yield from expert_targets(prefix, mlp, config, stored)


def _mlp_targets(prefix: str, mlp: MLP | PlainMLP, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    size = mlp.size
    if isinstance(mlp, PlainMLP):
        yield from parts_of(prefix, mlp.up_proj, {"up_proj": size})
        if mlp.alphas is not None:
            for name, view in zip(("alpha_p", "alpha_n"), mlp.alphas.data.split(1), strict=True):
                yield f"{prefix}act_fn.{name}", Target(view, (1,))
    else:
        is_fused = config.architecture in _FUSED_GATE_UP
        parts = {"gate_up_proj": 2 * size} if is_fused else {"gate_proj": size, "up_proj": size}
        yield from parts_of(prefix, mlp.gate_up_proj, parts)
    yield from parts_of(prefix, mlp.down_proj, {"down_proj": config.hidden_size})


def _norm_parts(prefix: str, norm: object, config: DecoderConfig) -> Iterator[tuple[str, Target]]:
    if not config.norm_weights:
        return
    if isinstance(norm, RMSNorm):
        yield f"{prefix}weight", norm_target(norm, config)
        return
    assert isinstance(norm, LayerNorm), "a family whose files have such a norm has it"
    yield f"{prefix}weight", Target(norm.weight.data, tuple(norm.weight.shape), config.norm_offset)
    if norm.bias is not None:
        yield f"{prefix}bias", whole(norm.bias)
