"""ModernBERT on a CPU: its layers over packed texts in one compiled call, in this processor's panels.

They are those of a decoder that looks both ways, with layer norms (Warner et al. 2024): the decoder's call runs them.
Told by its class, since nothing else has its names; what was read is believed once two texts come out as from
transformers' code.
"""

from __future__ import annotations

import torch
from torch import nn

from bulkrun.models.decoder.rotary_table import RotaryTable
from bulkrun.models.embedding.own_products import own_matrix
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.step_cache import StepCache
from bulkrun.models.embedding.two_texts import hidden_states
from bulkrun.models.general.comparison import distance, tolerance
from bulkrun.ops.cpu.attention_mixer import AttentionWeights
from bulkrun.ops.cpu.int8_linear import can_pack_int8
from bulkrun.ops.cpu.layer_stack import LayerStack, can_stack
from bulkrun.ops.cpu.layer_weights import Heads, LayerWeights, StackSizes
from bulkrun.ops.cpu.panel_linear import PANEL, can_pack_panels
from bulkrun.ops.cpu.stack_memory import Matrix
from bulkrun.settings import DEFAULT_BLOCK_SIZE, Quantization

_CLASS = "ModernBertModel"


class CompiledModernBert:
    """Implements `TextEncoder`. A text's hidden states have the same bits whatever else is in the step."""

    def __init__(self, encoder: PaddedEncoder, stack: LayerStack) -> None:
        self.config, self.dtype, self.device = encoder.config, encoder.dtype, encoder.device
        self.pair_separator = encoder.pair_separator  # None: its tokens have no types
        self._embeddings, self._stack = encoder.model.get_submodule("embeddings"), stack
        self._rotaries = list(_rotary_tables(encoder.model, self.dtype).values())
        self._cache = StepCache(self.config, DEFAULT_BLOCK_SIZE, self.dtype, self.device)

    def __call__(self, texts: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Hidden states [T, E], or [S, E] of `kept`: in the last layer no more than their part is computed."""
        step = self._cache.lay_out(texts)
        x_TE = self._embeddings(input_ids=texts.token_ids_T[None])[0].contiguous()
        rotaries = [table.rows(step.positions_T, texts.lens[-1]) for table in self._rotaries]
        return self._stack(x_TE, rotaries, step.cache.k, step.cache.v, step.meta, kept)

    def free_scratch(self) -> None:
        """Give the cache back."""
        self._cache.free()


def compile_modernbert(encoder: PaddedEncoder, quantization: Quantization | None) -> CompiledModernBert | None:
    """The same model, compiled; None where it is another or this processor or these sizes have no such call."""
    if type(encoder.model).__name__ != _CLASS or encoder.device.type != "cpu" or quantization == "fp8":
        return None
    if not _can_stack(encoder, quantization) or not _is_same(
        CompiledModernBert(encoder, _stack(encoder, None)), encoder
    ):
        return None
    return CompiledModernBert(encoder, _stack(encoder, quantization))


def _is_same(compiled: CompiledModernBert, encoder: PaddedEncoder) -> bool:
    return distance(hidden_states(compiled), hidden_states(encoder)) < tolerance(encoder.dtype)


def _can_stack(encoder: PaddedEncoder, quantization: Quantization | None) -> bool:
    """Whether the call does all that is in the model."""
    model = encoder.model
    norms = [module for module in model.modules() if isinstance(module, nn.LayerNorm)]
    products = [module.weight.data for module in model.modules() if type(module) is nn.Linear]
    if any(norm.bias is not None for norm in norms) or model.config.hidden_activation != "gelu":
        return False
    if not all(map(can_pack_panels, products)) or model.config.intermediate_size % PANEL:
        return False
    if quantization == "int8" and not all(can_pack_int8(*weight.shape) for weight in products):
        return False
    config = encoder.config
    if config.num_kv_heads != config.num_heads:
        return False  # so config.json says, at which its code does not look, and so the cache would be made
    return can_stack(_sizes(encoder), encoder.dtype, [Heads(config.num_heads, config.head_dim)])


def _sizes(encoder: PaddedEncoder) -> StackSizes:
    config, stored = encoder.config, encoder.model.config
    return StackSizes(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        eps=stored.norm_eps,
        scale=config.head_dim**-0.5,
        soft_cap=None,
        residual_multiplier=1.0,
        activation="gelu",
        is_layer_norm=True,
        is_causal=False,
        dtype=encoder.dtype,
    )


def _stack(encoder: PaddedEncoder, quantization: Quantization | None) -> LayerStack:
    model = encoder.model
    kinds = list(_rotary_tables(model, encoder.dtype))
    layers = [_weights(layer, kinds, encoder, quantization) for layer in model.get_submodule("layers").children()]
    return LayerStack(layers, model.get_submodule("final_norm").weight.data, _sizes(encoder))  # type: ignore[arg-type]


def _weights(
    layer: nn.Module, kinds: list[str], encoder: PaddedEncoder, quantization: Quantization | None
) -> LayerWeights:
    def matrix(name: str) -> Matrix:
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        return own_matrix(linear.weight.data, linear.bias, quantization)

    input_norm = layer.get_submodule("attn_norm")  # the first layer has none: embeddings are normalized
    window = layer.get_submodule("attn").sliding_window
    attention = AttentionWeights(
        qkv=matrix("attn.Wqkv"),
        num_kv_heads=encoder.config.num_heads,
        head_dim=encoder.config.head_dim,
        qk_norm=None,
        projection_norms=None,
        sliding_window=window if isinstance(window, int) else None,
        rotary=kinds.index(str(layer.attention_type)),
    )
    return LayerWeights(
        input_norm=input_norm.weight.data if isinstance(input_norm, nn.LayerNorm) else None,
        mixer=attention,
        o=matrix("attn.Wo"),
        mixer_out_norm=None,
        mlp_norm=layer.get_submodule("mlp_norm").weight.data,  # type: ignore[arg-type]
        gate_up=matrix("mlp.Wi"),
        down=matrix("mlp.Wo"),
        intermediate_size=encoder.model.config.intermediate_size,
        mlp_out_norm=None,
    )


def _rotary_tables(model: nn.Module, dtype: torch.dtype) -> dict[str, RotaryTable]:
    """Of each kind of layer: windowed ones turn faster."""
    rotary = model.get_submodule("rotary_emb")
    return {
        kind: RotaryTable(getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"), dtype)
        for kind in dict.fromkeys(str(layer.attention_type) for layer in model.get_submodule("layers").children())
    }
