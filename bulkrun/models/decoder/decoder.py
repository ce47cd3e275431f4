"""One decoder for every family of `families`: they differ by flags of `DecoderConfig`.

Knows weights and the order of ops. Knows no request, no scheduling and no sampling. The caller holds
`torch.inference_mode()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun import ops
from bulkrun.models.config.model_config import DecoderConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.decoder.altup_layer import AltUpLayer
from bulkrun.models.decoder.attention import Rotary
from bulkrun.models.decoder.decoder_layer import DecoderLayer
from bulkrun.models.decoder.layer_inputs import LayerInputEmbedding
from bulkrun.models.decoder.layers import ExpertLinear, Linear, empty_parameter
from bulkrun.models.decoder.norms import LayerNorm, RMSNorm, norm_of
from bulkrun.models.decoder.quantized_layers import Fp8Linear, QuantizedLinear
from bulkrun.models.decoder.residual_streams import BetweenBlocks, ResidualStreams, Streams
from bulkrun.models.decoder.rotary_frequencies import query_growth, rotary_frequencies
from bulkrun.models.decoder.rotary_table import RotaryTable
from bulkrun.models.decoder.sparse_mlp import SparseMLP
from bulkrun.models.decoder.step_tokens import StepTokens
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops import AttentionMetadata
from bulkrun.ops.cpu.layer_stack import LayerStack


class Decoder(nn.Module):
    """Token ids and a paged KV cache in, hidden states and logits out.

    Made with uninitialized weights; `bulkrun.models.loading.loader.load_model` fills them.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_weight = empty_parameter(config.vocab_size, config.hidden_size)
        self.embed_norm = RMSNorm(config, config.hidden_size) if config.norms_embeddings else None
        self.embeds_in: torch.dtype | None = None  # what embeddings become, where it is not their weight's own dtype
        layers = (_layer(config, layer) for layer in range(config.num_layers))
        inputs, altup = config.layer_inputs, config.altup
        self.layer_inputs = None if inputs is None else LayerInputEmbedding(config, inputs)
        self.streams = None if altup is None else ResidualStreams(config, altup)
        self.layers = cast("Sequence[DecoderLayer]", nn.ModuleList(layers))  # which does not say of what
        self.norm = norm_of(config)
        self.lm_head: Linear | nn.Identity = Linear(config.hidden_size, config.vocab_size, bias=config.has_head_bias)
        self.tie_weights()
        self.layer_stack: LayerStack | None = None  # the loader's, where one call can run all layers
        # each rotary embedding that some layer has, on the device once the loader has moved it there
        self.inv_freqs = {rope: rotary_frequencies(rope, config.head_dim) for rope in config.ropes if rope is not None}
        self._rotary_tables: dict[RopeConfig, RotaryTable] = {}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states and the KV cache, and of the weights that are not held in fewer bits."""
        return self.embeds_in or self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_weight.device

    @property
    def is_capturable(self) -> bool:
        """Whether no product of its waits for the device, which only experts' may."""
        sparse = [module for module in self.modules() if isinstance(module, SparseMLP)]
        of_experts = [linear for module in sparse for linear in (module.gate_up_proj, module.down_proj)]
        return not any(ops.waits_for_gpu(linear.experts, self.dtype) for linear in of_experts)

    @property
    def is_in_fp8(self) -> bool:
        """Whether matrices are, outside of experts."""
        return any(isinstance(module, Fp8Linear) for module in self.modules())

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_cache: KVCache,
        meta: AttentionMetadata,
        logits_indices: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the tokens' keys and values to the cache.

        input_ids_T, positions_T: integers [T], the tokens of all sequences in `meta`'s order. logits_indices: int64
        [S], ascending: only of these tokens, [S, E]; after the last look back no more than their part is computed.
        """
        residual_TE = self._embed(input_ids_T)
        inputs_LTU = None if self.layer_inputs is None else self.layer_inputs(input_ids_T, residual_TE)
        step = StepTokens(self._rotaries(positions_T, meta.max_context_len), inputs_LTU, meta)
        stack = self.layer_stack
        if stack is not None and not step.has_growth and stack.takes(residual_TE, kv_cache.dtype):
            states = [(*state.tensors,) for state in kv_cache.states]
            return stack(residual_TE, step.turns, kv_cache.k, kv_cache.v, meta, logits_indices, states, inputs_LTU)
        assert self.config.is_causal, "only the compiled layers look both ways"
        return self._block_by_block(residual_TE, step, kv_cache, logits_indices)

    def _block_by_block(
        self, embeds_TE: torch.Tensor, step: StepTokens, kv_cache: KVCache, kept: torch.Tensor | None
    ) -> torch.Tensor:
        """Embeddings to hidden states; behind the last block that looks back at the step's own tokens `kept` alone."""
        blocks = [block for layer in self.layers for block in layer.blocks()]
        last_look = max(i for i, block in enumerate(blocks) if block.looks_back)
        residual: Any = embeds_TE if self.streams is None else self.streams(embeds_TE)
        x_TE = blocks[0].norm(residual)
        for i, block in enumerate(blocks):
            x_TE = block.module(x_TE, step.beside(block), kv_cache, step.meta)
            if i == last_look and kept is not None:
                x_TE, residual = x_TE[kept], residual[kept]
                if not x_TE.shape[0]:
                    return x_TE  # the middle of a prompt: no more than its keys and values was wanted
                if self.config.shares_keys or step.inputs_LTU is not None:
                    step = step.only(kept)
            next_norm = blocks[i + 1].norm if i + 1 < len(blocks) else self._last_norm
            x_TE, residual = next_norm.add(block.out(x_TE), residual, block.scale)
        return x_TE

    @property
    def _last_norm(self) -> RMSNorm | LayerNorm | BetweenBlocks:
        return self.norm if self.streams is None else BetweenBlocks(self._merge)

    def _merge(self, found_TE: torch.Tensor, streams: Streams) -> torch.Tensor:
        """Of several residual streams, behind the last block: their mean, normalized."""
        assert self.streams is not None, "one stream needs no merging"
        streams.tell_others(found_TE)
        return self.norm(self.streams.merged(streams))

    def compute_logits(self, hidden_SE: torch.Tensor, *, as_computed: bool = False) -> torch.Tensor:
        """Logits float32 [S, V] of the rows that sample; `as_computed`: in the head's dtype if nothing follows it."""
        divisor, soft_cap = self.config.logits_divisor, self.config.logits_soft_cap
        logits_SV = self.lm_head(hidden_SE)
        if as_computed and divisor == 1.0 and soft_cap is None:
            return logits_SV
        logits_SV = logits_SV.float()
        if divisor != 1.0:
            logits_SV = logits_SV / divisor
        return logits_SV if soft_cap is None else (logits_SV / soft_cap).tanh_().mul_(soft_cap)

    def tie_weights(self) -> None:
        """Tie the head to the embedding, where the model says so."""
        if self.config.tie_word_embeddings and isinstance(self.lm_head, Linear):
            self.lm_head.weight, self.lm_head.is_tied = self.embed_weight, True

    def drop_head(self) -> None:
        """Have no head, for hidden states alone: a tied one would be copied once more to be multiplied with."""
        self.lm_head = nn.Identity()

    def cast(self, dtype: torch.dtype) -> None:
        """Make the weights `dtype`, but for those that a module says are float32 in every model (`in_float32`)."""
        self.to(dtype)
        for module in self.modules():
            for name in getattr(module, "in_float32", ()):
                parameter = getattr(module, name)
                if parameter is not None:
                    parameter.data = parameter.data.float()

    def pack_weights(self, *, quantized_alone: bool = False) -> None:
        """Lay every matrix, or quantized ones, out for this device's fastest product; a tied head becomes a copy."""
        kinds = QuantizedLinear if quantized_alone else Linear | ExpertLinear | QuantizedLinear
        for module in self.modules():
            if isinstance(module, kinds):
                module.pack()

    def _embed(self, input_ids_T: torch.Tensor) -> torch.Tensor:
        embeds_TE = F.embedding(input_ids_T, self.embed_weight).to(self.dtype)
        if self.embed_norm is not None:
            embeds_TE = self.embed_norm(embeds_TE)
        if self.config.embedding_multiplier == 1.0:
            return embeds_TE
        # rounded as the embeddings are: the models were trained with that
        return embeds_TE * torch.tensor(self.config.embedding_multiplier, dtype=self.dtype).item()

    def _rotaries(self, positions_T: torch.Tensor, num_positions: int) -> dict[RopeConfig | None, Rotary]:
        """Cosines and sines of each rotary embedding, and what layers without have; all positions are below
        `num_positions`."""
        rotaries: dict[RopeConfig | None, Rotary] = {
            rope: self._rotary(rope, positions_T, num_positions) for rope in self.inv_freqs
        }
        growth = self.config.growth_without_rope
        if growth is not None and (not positions_T.is_cpu or num_positions >= growth.num_tokens):
            rotaries[None] = Rotary(None, None, query_growth(positions_T + 1, *growth))
        return rotaries

    def _rotary(self, rope: RopeConfig, positions_T: torch.Tensor, num_positions: int) -> Rotary:
        """From a table on a CPU; a captured step of a GPU must not read one that grows."""
        inv_freq, growth = self.inv_freqs[rope], None
        if rope.query_growth and (not positions_T.is_cpu or num_positions > rope.original_max_position_embeddings):
            growth = query_growth(positions_T, rope.query_growth, rope.original_max_position_embeddings).to(self.dtype)
        if not positions_T.is_cpu:
            return Rotary(*ops.rotary_cos_sin(positions_T, inv_freq, rope.attention_factor, self.dtype), growth)
        if rope not in self._rotary_tables:
            self._rotary_tables[rope] = RotaryTable(inv_freq, rope.attention_factor, self.dtype)
        return Rotary(*self._rotary_tables[rope].rows(positions_T, num_positions), growth)


def _layer(config: DecoderConfig, layer: int) -> DecoderLayer:
    altup = config.altup
    return DecoderLayer(config, layer) if altup is None else AltUpLayer(config, altup, layer)
