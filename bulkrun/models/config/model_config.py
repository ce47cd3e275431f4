"""What a checkpoint's config.json says: the sizes every model has, and for a family of the decoder its flags.

Torch-free. What a family is stands in `families`, which one a file is of in `architectures`; what is of none goes the
general way (`general_config`). What cannot run at all is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.activation import activation_of
from bulkrun.models.config.altup import AltUpConfig, altup_of
from bulkrun.models.config.architectures import find_family, text_part
from bulkrun.models.config.common_facts import common_facts, with_dtype
from bulkrun.models.config.config_file import read_config
from bulkrun.models.config.experts import MoEConfig, moe_of
from bulkrun.models.config.family import Family, NormPlacement, QKNorm, read_keys
from bulkrun.models.config.general_config import general_facts
from bulkrun.models.config.heads import are_normed_behind_rope, heads_of, qk_norm_of, unlike_layers_of
from bulkrun.models.config.latent import LatentConfig, latent_of
from bulkrun.models.config.layer_inputs import LayerInputs, layer_inputs_of
from bulkrun.models.config.layer_kinds import layer_ropes, of_heads, of_one_length, sliding_windows, windows_both_ways
from bulkrun.models.config.layer_kv import LayerKV
from bulkrun.models.config.llama4_file import QueryGrowth, growth_of
from bulkrun.models.config.multipliers import Multipliers, attention_scale, embedding_multiplier, multipliers_of
from bulkrun.models.config.recurrence import Recurrence
from bulkrun.models.config.rope import RopeConfig, max_positions, rope_keys
from bulkrun.models.config.stored_quantization import Quantized, stored_quantization
from bulkrun.windows import Window

_ANY_LENGTH = 2**20  # tokens: some bound that a table of blocks may have
_AS_THE_FAMILY = (  # flags of a model that no key of its files changes
    "norm_biases", "norm_weights", "norm_offset", "norm_rounds_once", "norms_values", "norms_embeddings",
    "has_mlp_gates", "has_head_bias", "has_sinks", "gates_attention", "gates_heads", "scales_layers", "turns_backwards",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the engine must know of any decoder-only transformer."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: str  # bfloat16, float16 or float32: what the weights are stored in
    unlike_layers: tuple[LayerKV, ...] | None = None  # each one's keys, where they differ or are shared

    @property
    def layers_kv(self) -> tuple[LayerKV, ...]:
        """What each layer of attention keeps of a token."""
        sizes, latent_dim = (self.num_kv_heads, self.head_dim), self.latent_dim
        return self.unlike_layers or tuple(LayerKV(*sizes, layer, latent_dim) for layer in range(self.num_kv_layers))

    @property
    def latent_dim(self) -> int | None:
        """Where values are the last dimensions of their keys, how many of them; None: values lie beside keys."""
        return None

    @property
    def kv_size(self) -> int:
        """Numbers that the cache holds of a token: keys and values of all layers."""
        return sum(kv.cached_size for layer, kv in enumerate(self.layers_kv) if kv.source == layer)

    @property
    def shares_keys(self) -> bool:
        """Whether layers read the keys and values of earlier ones."""
        return any(kv.source != layer for layer, kv in enumerate(self.layers_kv))

    @property
    def reachable_positions(self) -> int:
        """The longest sequences that a user may ask for; `max_position_embeddings` is the default."""
        return self.max_position_embeddings

    @property
    def num_kv_layers(self) -> int:
        """The layers whose keys and values are kept."""
        return self.num_layers

    @property
    def num_state_layers(self) -> int:
        """Those that keep a state of one size."""
        return 0

    def model_len(self, asked: int | None) -> int:
        """The longest sequences where `engine.max_model_len` is `asked`. Raises UsageError where that is too much."""
        limit = self.reachable_positions
        if asked is not None and asked > limit:
            raise UsageError(f"engine.max_model_len: {asked} is above the model's {limit} positions; at most {limit}")
        return asked or self.max_position_embeddings

    @staticmethod
    def from_dir(path: Path | str) -> ModelConfig:
        """Read `path`/config.json. Raises ModelError for a missing or broken file and for anything unsupported."""
        return read_config(Path(path), lambda raw: ModelConfig.from_dict(with_dtype(raw, Path(path))))

    @staticmethod
    def from_dict(raw: Mapping[str, Any]) -> ModelConfig:
        """Read a parsed config.json: a DecoderConfig for the decoder's families, a plain one for the general path.

        Raises ModelError for anything unsupported, KeyError for a missing size.
        """
        raw = text_part(raw)
        found = find_family(raw)
        if found is not None:
            return DecoderConfig.of_family(*found, raw)
        return ModelConfig(**general_facts(raw), **common_facts(raw))


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """One model of the decoder's families: everything in which they differ."""

    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: QKNorm
    norms: NormPlacement
    are_centered: bool  # norms
    norm_biases: bool
    norm_weights: bool
    norm_offset: float
    norm_rounds_once: bool
    activation: str  # of gates or, without, of all: silu, gelu, gelu_tanh, relu2, xielu
    has_mlp_gates: bool  # MLPs and experts, beside what these let through
    has_head_bias: bool
    attention_scale: float
    attention_soft_cap: float | None
    qkv_limit: float | None  # queries, keys and values are at most so far from zero
    has_sinks: bool
    logits_soft_cap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    sliding_windows: tuple[Window | None, ...]  # per layer; None: full attention
    ropes: tuple[RopeConfig | None, ...]  # per layer; None: positions play no role in it
    moe: MoEConfig | None
    growth_without_rope: QueryGrowth | None = None  # of queries in layers that have none
    recurrence: Recurrence | None = None  # of layers that have it in the place of attention
    mlp_alone: tuple[bool, ...] | None = None  # per layer that is one block: an MLP (or not); None: each has both
    attends_beside_states: bool = False  # each layer that keeps a state has attention too, and their sum goes on
    multipliers: Multipliers | None = None
    gates_attention: bool = False  # its outputs are multiplied by the sigmoid of what queries come with
    gates_heads: bool = False  # each head's outputs are, by one number
    norms_values: bool = False  # each value head is normalized, without a weight
    keys_are_values: tuple[bool, ...] | None = None  # per layer: whether one projection does for both
    mlp_sizes: tuple[int, ...] | None = None  # per layer, of dense MLPs; None: each is `intermediate_size` wide
    mlp_sparsities: tuple[float, ...] | None = None  # per layer, of dense MLPs: the part of gates that is to be zero
    altup: AltUpConfig | None = None  # there are several residual streams
    layer_inputs: LayerInputs | None = None
    scales_layers: bool = False  # behind each layer the residual stream is multiplied by a number of its own
    turns_neighbours: bool = False  # checkpoints have the dimensions that RoPE turns together side by side
    turns_backwards: bool = False  # or each second half of a head first
    norms_embeddings: bool = False
    latent: LatentConfig | None = None  # keys and values are made of latents, which take their place in the cache
    stored_quantization: Quantized | None = None  # None: the weights are in `dtype`
    is_causal: bool = True  # False: each token sees later ones too, within a window as far ahead as behind

    @property
    def reachable_positions(self) -> int:
        """Files with a linear factor give either the context after stretching or the one before: nobody can tell.

        States hold what there is, however long.
        """
        if not any(self.attends):
            return _ANY_LENGTH
        stretched = [rope.stretched_positions for rope in self.ropes if rope is not None]
        return max([self.max_position_embeddings, *stretched])

    @property
    def num_kv_layers(self) -> int:
        """Those that attend."""
        return sum(self.attends)

    @property
    def num_state_layers(self) -> int:
        """Those that keep a state of one size."""
        return 0 if self.recurrence is None else sum(self.recurrence.layers)

    @property
    def attends(self) -> tuple[bool, ...]:
        """Per layer: whether it has attention, and not only what keeps a state, or an MLP alone."""
        no_layer = (False,) * self.num_layers
        if self.attends_beside_states:
            return (True,) * self.num_layers
        has_state = no_layer if self.recurrence is None else self.recurrence.layers
        pairs = zip(has_state, self.mlp_alone or no_layer, strict=True)
        return tuple(not (is_state or is_mlp) for is_state, is_mlp in pairs)

    @property
    def latent_dim(self) -> int | None:
        """Of latents, which are what values are to the cache."""
        return None if self.latent is None else self.latent.kv_lora_rank

    def norms_of(self, layer: int) -> NormPlacement:
        """Where a layer's norms are."""
        if self.norms != "post_of_attention":
            return self.norms
        return "post" if self.attends[layer] else "pre"

    def mlp_size(self, layer: int) -> int:
        """Of a layer's dense MLP, where it has one."""
        return self.intermediate_size if self.mlp_sizes is None else self.mlp_sizes[layer]

    def mlp_sparsity(self, layer: int) -> float:
        """Which part of its gates is to be zero."""
        return 0.0 if self.mlp_sparsities is None else self.mlp_sparsities[layer]

    @classmethod
    def of_family(
        cls, architecture: str, family: Family, raw: Mapping[str, Any], *, is_causal: bool = True
    ) -> DecoderConfig:
        """Read a parsed config.json of the family. Raises ModelError for what the decoder cannot do."""
        raw = family.in_common_words(raw)
        quantization, keys = stored_quantization(raw), read_keys(raw, family)
        if is_causal and keys.get("use_bidirectional_attention"):
            raise ModelError(
                "use_bidirectional_attention makes this an encoder; models that generate text are supported"
            )
        num_heads, num_kv_heads, head_dim = heads_of(keys)
        windows = sliding_windows(keys) if is_causal else windows_both_ways(keys)
        rope = rope_keys(raw, family.rope)
        unlike_layers, latent = unlike_layers_of(keys, num_heads), latent_of(keys)
        turning_dim = head_dim if latent is None else latent.qk_rope_head_dim
        ropes = of_heads(layer_ropes(raw, rope, keys, windows, turning_dim), unlike_layers, latent)
        qk_norm = qk_norm_of(keys, family)
        attention_bias = bool(keys.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=keys["vocab_size"],
            hidden_size=keys["hidden_size"],
            intermediate_size=keys["intermediate_size"],
            num_layers=keys["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions(rope, keys["max_position_embeddings"]),
            rms_norm_eps=keys["rms_norm_eps"],
            tie_word_embeddings=bool(keys["tie_word_embeddings"]),
            qkv_bias=family.qkv_bias or attention_bias,
            o_bias=bool(keys.get("attention_out_bias", attention_bias)),
            mlp_bias=bool(keys.get("mlp_bias", False)),
            qk_norm=qk_norm,
            norms=keys.get("norms", family.norms),
            are_centered=bool(keys.get("are_centered", family.are_centered)),
            activation=activation_of(keys, family),
            attention_scale=attention_scale(keys, head_dim),
            attention_soft_cap=keys.get("attn_logit_softcapping"),
            qkv_limit=keys.get("clip_qkv"),
            logits_soft_cap=keys.get("final_logit_softcapping"),
            embedding_multiplier=embedding_multiplier(keys, family),
            residual_multiplier=keys.get("residual_multiplier", 1.0),
            logits_divisor=keys.get("logits_scaling", 1.0),
            sliding_windows=windows,
            ropes=of_one_length(ropes) if are_normed_behind_rope(qk_norm, family) else ropes,
            moe=moe_of(keys, family),
            growth_without_rope=growth_of(keys),
            recurrence=family.recurrence(keys) if family.recurrence and any(keys["linear_layers"]) else None,
            mlp_alone=_per_layer(keys, "mlp_alone"),
            attends_beside_states=bool(keys.get("attends_beside_states")),
            multipliers=multipliers_of(keys),
            keys_are_values=_per_layer(keys, "keys_are_values"),
            mlp_sizes=_per_layer(keys, "mlp_sizes"),
            mlp_sparsities=_per_layer(keys, "mlp_sparsities"),
            altup=altup_of(keys),
            layer_inputs=layer_inputs_of(keys),
            unlike_layers=unlike_layers,
            turns_neighbours=bool(keys.get("rope_interleave", family.turns_neighbours)),
            latent=latent,
            stored_quantization=quantization,
            is_causal=is_causal,
            **{name: getattr(family, name) for name in _AS_THE_FAMILY},
            **common_facts(raw),
        )


def _per_layer(keys: Mapping[str, Any], name: str) -> tuple[Any, ...] | None:
    return None if keys.get(name) is None else tuple(keys[name])
