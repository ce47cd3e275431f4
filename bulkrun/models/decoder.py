"""One decoder for the whole Llama family: Llama, Mistral, Qwen2 and Qwen3 differ by flags of `ModelConfig`.

Knows weights and the order of ops. Knows no request, no scheduling and no sampling. The caller holds
`torch.inference_mode()`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bulkrun import ops
from bulkrun.models.config import ModelConfig
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.layers import DecoderLayer, Linear, RMSNorm, empty_parameter
from bulkrun.models.rotary_frequencies import rotary_frequencies
from bulkrun.ops import AttentionMetadata


class Decoder(nn.Module):
    """Token ids and a paged KV cache in, hidden states and logits out.

    Made with uninitialized weights; `bulkrun.models.loader.load_model` fills them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_weight = empty_parameter(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)
        self.tie_weights()
        self.inv_freq = rotary_frequencies(config.rope, config.head_dim)  # loader moves it to the device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights, the hidden states and the KV cache."""
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embed_weight.device

    def forward(
        self, input_ids_T: torch.Tensor, positions_T: torch.Tensor, kv_cache: KVCache, meta: AttentionMetadata
    ) -> torch.Tensor:
        """Hidden states [T, E] after the last norm; writes the tokens' keys and values to the cache.

        input_ids_T, positions_T: integers [T], the tokens of all sequences in `meta`'s order.
        """
        cos, sin = ops.rotary_cos_sin(positions_T, self.inv_freq, self.config.rope.attention_factor, self.dtype)
        residual_TE = F.embedding(input_ids_T, self.embed_weight)
        x_TE = self.layers[0].input_norm(residual_TE)
        for i, layer in enumerate(self.layers):
            x_TE = layer.attention(x_TE, cos, sin, kv_cache.k[i], kv_cache.v[i], meta)
            x_TE, residual_TE = layer.post_attention_norm.add(x_TE, residual_TE)
            x_TE = layer.mlp(x_TE)
            next_norm = self.layers[i + 1].input_norm if i + 1 < len(self.layers) else self.norm
            x_TE, residual_TE = next_norm.add(x_TE, residual_TE)
        return x_TE

    def compute_logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """Logits float32 [S, V] of the rows that sample."""
        return self.lm_head(hidden_SE).float()

    def tie_weights(self) -> None:
        """Make the head the embedding, where the model says so."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_weight

    def pack_weights(self) -> None:
        """Lay every matrix out for this device's fastest product (a tied head becomes a second copy)."""
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()
