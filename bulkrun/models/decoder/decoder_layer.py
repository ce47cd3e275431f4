"""One layer of the decoder: attention over the paged cache and an MLP, with norms where the family has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from bulkrun.models.config.delta_net import DeltaNetConfig, KimiDeltaConfig
from bulkrun.models.config.mamba import MambaConfig
from bulkrun.models.config.mamba2 import Mamba2Config
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.config.short_conv import ShortConvConfig
from bulkrun.models.decoder.attention import Attention, Rotary
from bulkrun.models.decoder.gated_delta_net import GatedDeltaNet
from bulkrun.models.decoder.kimi_delta_net import KimiDeltaNet
from bulkrun.models.decoder.latent_attention import LatentAttention
from bulkrun.models.decoder.layer_inputs import LayerInputMLP
from bulkrun.models.decoder.layers import MLP, PlainMLP, Scale, dense_mlp, empty_parameter
from bulkrun.models.decoder.mamba import Mamba
from bulkrun.models.decoder.mamba2 import Mamba2
from bulkrun.models.decoder.norms import LayerNorm, NoNorm, NormOfBefore, RMSNorm, norm_of
from bulkrun.models.decoder.residual_streams import BetweenBlocks
from bulkrun.models.decoder.short_conv import ShortConv
from bulkrun.models.decoder.sparse_mlp import DenseBesideExperts, SparseMLP
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata


class AttentionBesideMamba2(nn.Module):
    """Both look at the same hidden states, and what they find is added up (Falcon-H1)."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        assert config.multipliers is not None, "the family that has this has them"
        self.attention, self.mamba = Attention(config, layer, layer), Mamba2(config, layer)
        self.attention_out, self.state_out = config.multipliers.attention_out, config.multipliers.state_out

    def forward(
        self, x_TE: torch.Tensor, rotary: Rotary | None, kv_cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        """[T, E] -> [T, E]; writes this step's keys and values, and brings states up to its last tokens."""
        attended_TE = self.attention(x_TE, rotary, kv_cache, meta)
        return attended_TE.mul_(self.attention_out).add_(self.mamba(x_TE, None, kv_cache, meta), alpha=self.state_out)


class Block(NamedTuple):
    """One of the blocks around the residual stream: what it adds is `out(module(norm(residual)))`."""

    norm: RMSNorm | LayerNorm | NoNorm | NormOfBefore | BetweenBlocks
    module: nn.Module  # called with hidden states, its rotary embedding, the KV cache and the metadata of the step
    out: RMSNorm | LayerNorm | NoNorm | Scale
    rope: RopeConfig | None = None
    looks_back: bool = False  # at what it makes of earlier tokens: none of a step's may be left out before it
    layer: int | None = None  # whose input is the module's, in the place of a rotary embedding; None: it takes none
    scale: torch.Tensor | None = None  # what the residual stream is multiplied by behind it [1]; None: nothing


class DecoderLayer(nn.Module):
    """Attention, or what stands in its place, and MLP around one residual stream; some families have one of both."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        norms = config.norms_of(layer)
        has_norm_before, has_norm_after = norms != "post", norms in ("post", "sandwich")

        def norm_before() -> RMSNorm | LayerNorm | NoNorm:
            return norm_of(config) if has_norm_before else NoNorm()

        def norm_after() -> RMSNorm | LayerNorm | NoNorm | Scale:
            return norm_of(config) if has_norm_after else _plain_out(config)

        self.rope, self.layer = config.ropes[layer], layer
        has_attention, has_mlp = config.mlp_alone is None or not config.mlp_alone[layer], config.mlp_alone is None
        self.attention = _attention(config, layer) if has_attention else None
        if has_attention:
            self.input_norm, self.attention_out = norm_before(), norm_after()
        self.mlp = _mlp(config, layer) if has_mlp or not has_attention else None
        if self.mlp is not None:
            has_norms = isinstance(self.mlp, DenseBesideExperts)
            self.own_norm = norm_before() if norms == "beside_own" else None
            beside = self.input_norm if norms == "beside" else self.own_norm
            before = NoNorm() if has_norms else norm_before() if beside is None else NormOfBefore(beside)
            self.mlp_norm, self.mlp_out = before, norm_after()
            if config.multipliers is not None:
                self.mlp_out = Scale(config.multipliers.mlp_out)

        self.input_mlp = None if config.layer_inputs is None else LayerInputMLP(config, config.layer_inputs)
        self.input_out = None if self.input_mlp is None else RMSNorm(config, config.hidden_size)
        self.scale = empty_parameter(1) if config.scales_layers else None

    def blocks(self) -> Iterator[Block]:
        """Those that it has, in their order."""
        blocks = [*self._blocks()]
        yield from blocks[:-1]
        yield blocks[-1]._replace(scale=self.scale)

    def _blocks(self) -> Iterator[Block]:
        if self.attention is not None:
            reads_others = isinstance(self.attention, Attention) and not self.attention.has_own_keys
            yield Block(self.input_norm, self.attention, self.attention_out, self.rope, looks_back=not reads_others)
        if self.mlp is not None:
            yield Block(self.mlp_norm, self.mlp, self.mlp_out)
        if self.input_mlp is not None and self.input_out is not None:
            yield Block(NoNorm(), self.input_mlp, self.input_out, layer=self.layer)


def _attention(
    config: DecoderConfig, layer: int
) -> Attention | LatentAttention | AttentionBesideMamba2 | GatedDeltaNet | KimiDeltaNet | Mamba | Mamba2 | ShortConv:
    """Attention, or what a layer that keeps a state has in its place or beside it."""
    if config.attends_beside_states:
        return AttentionBesideMamba2(config, layer)
    if config.attends[layer]:
        index, latent = sum(config.attends[:layer]), config.latent
        return Attention(config, layer, index) if latent is None else LatentAttention(config, latent, index)
    kind = config.recurrence
    assert kind is not None, "what does not attend has an MLP alone or keeps a state"
    return _WITH_STATE[type(kind)](config, sum(kind.layers[:layer]))


def _mlp(config: DecoderConfig, layer: int) -> MLP | PlainMLP | SparseMLP | DenseBesideExperts:
    moe, dense_size = config.moe, config.mlp_size(layer)
    if moe is None or not moe.sparse_layers[layer]:
        return dense_mlp(config, dense_size, config.mlp_sparsity(layer))
    return DenseBesideExperts(config, dense_size) if moe.beside_mlp else SparseMLP(config)


_WITH_STATE: Mapping[type, type[GatedDeltaNet | KimiDeltaNet | Mamba | Mamba2 | ShortConv]] = {
    DeltaNetConfig: GatedDeltaNet,
    KimiDeltaConfig: KimiDeltaNet,
    MambaConfig: Mamba,
    Mamba2Config: Mamba2,
    ShortConvConfig: ShortConv,
}


def _plain_out(config: DecoderConfig) -> NoNorm | Scale:
    return NoNorm() if config.residual_multiplier == 1.0 else Scale(config.residual_multiplier)
