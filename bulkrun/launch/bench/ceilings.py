"""The least time a workload can take on a device of a given GEMM rate and read bandwidth. Arithmetic; torch-free.

`gemm_s`: the FLOPs of the layers' weights for every token, of lm_head for every output token, and of attention.
`kv_s`: every output token reads the keys and values of all tokens before it. Reads of weights hide behind GEMMs of
large steps and are not counted; prefixes that requests share are counted for each of them (so an engine that computes
them once can pass 100%). All as published: the last output token, which nobody feeds back, and the last layer of
tokens that nobody samples from are counted too, so that an engine which leaves them out can pass 100% by a few percent
where outputs are short or layers few. So are layers without keys of their own, through which most tokens of prompts do
not go. A head's score and value of a latent are counted as those of the key and the value that it stands for, which
are fewer numbers.

SERIAL = gemm_s + kv_s: kernels one after another. MAX = max(gemm_s, kv_s): perfect overlap. NanoFlow-optimal: GEMM rate
/ (2 * all parameters) tokens a second, which knows no attention and no KV.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress
from typing import NamedTuple

from bulkrun.errors import UsageError
from bulkrun.launch.bench.workload import Work
from bulkrun.models.config.layer_kv import LayerKV
from bulkrun.models.config.layer_weights import layer_weights
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.windows import Chunks, Window

FLOPS_PER_WEIGHT = 2
FLOPS_PER_PAIR = 4  # per query, key and dimension: query times key, weight times value


class DeviceRates(NamedTuple):
    """What a device was measured to do."""

    gemm_flop_s: float
    read_bytes_s: float
    sustained_flop_s: float | None = None  # of GEMMs without a pause, as power allows; None: not measured


def known_shape(config: ModelConfig) -> DecoderConfig:
    """The model's, for counting. Raises UsageError for one of the general path, whose weights transformers knows."""
    if not isinstance(config, DecoderConfig):
        raise UsageError(
            f"{config.architecture} runs through transformers' own code, so its FLOPs are not known; "
            "a roofline needs one of the architectures that `bulkrun models` calls fast"
        )
    return config


class AttentionCost(NamedTuple):
    """Of one layer."""

    width: int  # query heads times their dimension, where values have others on average
    kv_bytes: int  # per token
    window: Window | None


@dataclass(frozen=True, slots=True)
class ModelCost:
    """What one token costs: weights it is multiplied with, and what layers look at."""

    num_body_weights: int
    num_lm_head_weights: int
    num_parameters: int  # of a token's path, the embedding included
    attention: tuple[AttentionCost, ...]  # per layer that attends
    state_bytes: int = 0  # read and written for every output token, over all layers that keep a state

    @classmethod
    def of(cls, config: ModelConfig, kv_itemsize: int) -> ModelCost:
        """Raises UsageError as `known_shape` does."""
        config = known_shape(config)
        body = sum(layer_weights(config, layer) for layer in range(config.num_layers))
        if config.layer_inputs is not None:  # a projection for all layers, and two in each
            body += 3 * config.num_layers * config.hidden_size * config.layer_inputs.size
        if config.altup is not None:
            body += config.altup.stream_weights(config.hidden_size)
        lm_head = config.vocab_size * config.hidden_size
        return cls(
            num_body_weights=body,
            num_lm_head_weights=lm_head,
            num_parameters=body + lm_head * (1 if config.tie_word_embeddings else 2),
            attention=tuple(
                AttentionCost(_attention_width(config, kv), kv.cached_size * kv_itemsize, window)
                for kv, window in zip(config.layers_kv, compress(config.sliding_windows, config.attends), strict=True)
            ),
            state_bytes=0 if config.recurrence is None else 2 * config.recurrence.bytes_per_sequence(kv_itemsize),
        )


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The least seconds a workload takes, and its tokens."""

    gemm_s: float
    kv_s: float
    nanoflow_s: float

    @property
    def serial_s(self) -> float:
        """For an engine that runs its kernels one after another."""
        return self.gemm_s + self.kv_s

    @property
    def max_s(self) -> float:
        """For an engine that overlaps them perfectly."""
        return max(self.gemm_s, self.kv_s)


def ceilings(cost: ModelCost, work: Iterable[Work], rates: DeviceRates) -> Ceilings:
    """The ceilings of these requests on this device."""
    flops = kv_bytes = 0.0
    num_tokens = 0
    for one in work:
        num_input, num_output = len(one.prompt_token_ids), one.num_output_tokens
        total = num_input + num_output
        num_tokens += total
        flops += FLOPS_PER_WEIGHT * (cost.num_body_weights * total + cost.num_lm_head_weights * num_output)
        kv_bytes += cost.state_bytes * num_output
        for layer in cost.attention:
            pairs = attended(total, layer.window)
            flops += FLOPS_PER_PAIR * layer.width * pairs
            kv_bytes += layer.kv_bytes * (pairs - attended(num_input, layer.window))
    return Ceilings(
        gemm_s=flops / rates.gemm_flop_s,
        kv_s=kv_bytes / rates.read_bytes_s,
        nanoflow_s=num_tokens * FLOPS_PER_WEIGHT * cost.num_parameters / rates.gemm_flop_s,
    )


def attended(num_tokens: int, window: Window | None) -> int:
    """How many (query, key) pairs a causal layer looks at over the first `num_tokens` positions."""
    if isinstance(window, Chunks):
        whole, rest = divmod(num_tokens, window.size)
        return whole * attended(window.size, None) + attended(rest, None)
    inside = num_tokens if window is None else min(num_tokens, window)
    return inside * (inside + 1) // 2 + (num_tokens - inside) * inside


def _attention_width(config: DecoderConfig, kv: LayerKV) -> int:
    if config.latent is None:
        return config.num_heads * kv.head_dim
    return config.num_heads * (config.latent.query_dim + config.latent.v_head_dim) // 2
