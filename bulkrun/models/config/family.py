"""What is said of a family of decoders, and how its config.json is read. Torch-free. The table: `families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from bulkrun.errors import ModelError
from bulkrun.models.config.recurrence import Recurrence

NormPlacement = Literal["pre", "post", "post_of_attention", "sandwich", "beside", "beside_own"]
Scores = Literal["softmax", "sigmoid"]  # of a mixture's experts: over all of them, or of each by itself
QKNorm = Literal["none", "head", "turned_head", "centered_head", "plain_head", "projection"]


@dataclass(frozen=True, slots=True)
class Family:
    """What an architecture fixes, and what its config.json may say."""

    model_type: str  # transformers' name for its configuration
    models: str  # which published models are of it
    notes: str
    keys: Mapping[str, Any] = field(default_factory=dict)  # read beyond _COMMON_KEYS, or with another default
    qkv_bias: bool = False  # always has biases on q, k and v, never on o
    # "head": each head by itself; "turned_head": so too, behind RoPE; "centered_head": so too, less its mean and with a
    # weight of its own; "plain_head": so too, without a weight, in layers with RoPE; "projection": all of q, all of k,
    # as one vector
    qk_norm: QKNorm = "none"  # where the keys that are read say nothing
    # before attention and MLP, after them, after them where a layer attends and before them elsewhere, or both; or
    # "beside": one before both, which stand beside each other, or "beside_own": one before each of them
    norms: NormPlacement = "pre"  # where the keys that are read say nothing
    are_centered: bool = False  # norms subtract the mean first (layer normalization)
    norm_biases: bool = False  # and those have biases
    norm_weights: bool = True  # False: norms have nothing to learn
    norm_offset: float = 0.0  # added to a norm's stored weight
    norm_rounds_once: bool = False  # norms multiply by their weight in float32
    scales_embeddings: bool = False  # by the square root of hidden_size
    norms_embeddings: bool = False
    has_mlp_gates: bool = True
    has_head_bias: bool = False
    has_sinks: bool = False  # attention's softmax has a learned score beside those of the keys
    has_expert_biases: bool = False  # of a mixture's router and experts
    gates_shared_expert: bool = True
    routes_in_float32: bool = False  # to experts
    expert_scores: Scores = "softmax"
    weighs_expert_inputs: bool = False  # what goes into experts is multiplied by scores, and not what comes out
    gates_attention: bool = False  # each query head comes with a gate for what it finds
    gates_heads: bool = False  # one number does for each head
    norms_values: bool = False  # each value head is normalized by itself, without a weight
    scales_layers: bool = False  # behind each layer the residual stream is multiplied by a number of its own
    turns_neighbours: bool = False  # RoPE turns each even dimension with the next one, and not with one half a head on
    turns_backwards: bool = False  # and the other way round
    rope: Mapping[str, Any] = field(default_factory=dict)  # where the file says nothing of its scaling
    # the file's keys in the words of the others, and what layers that keep a state are by the keys that are read
    in_common_words: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict
    recurrence: Callable[[Mapping[str, Any]], Recurrence] | None = None


_COMMON_KEYS: Mapping[str, Any] = {
    "head_dim": None,  # hidden_size / num_attention_heads
    "num_key_value_heads": None,  # num_attention_heads
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
BIASES = {"attention_bias": False, "mlp_bias": False}
WINDOW = {"sliding_window": 4096, "layer_types": None}
LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
BY_SIGMOID: dict[str, Any] = {  # experts that are chosen so
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "mlp_only_layers": None,
}
IN_GROUPS = {"n_group": 1, "topk_group": 1, "group_experts_counted": 2}  # as DeepSeek V3's are
GRANITE_KEYS: dict[str, Any] = {
    "attention_bias": False,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}
_MAX_LAYERS = 10_000  # a hundred times those of any model: a damaged file says more
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_FACTORS = (
    "attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "logits_scaling",
)  # fmt: skip


def read_keys(raw: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """The keys the family reads, from the file or by default.

    Raises KeyError for a size that is missing and has no default, ModelError for one that is not a number.
    """
    keys = {name: raw.get(name, default) for name, default in {**_COMMON_KEYS, **family.keys}.items()}
    if "num_experts" in keys and "num_local_experts" in raw:  # Mixtral's name, and what transformers 5 writes
        keys["num_experts"] = raw["num_local_experts"]
    for size in _SIZES:
        keys[size] = raw[size] if size in raw else family.keys[size]
    for name in (*_SIZES, "max_position_embeddings", "rms_norm_eps", "rope_theta"):
        check_number(name, keys[name], float if name in ("rms_norm_eps", "rope_theta") else int)
    layers_of(keys)
    for name in ("num_key_value_heads", "head_dim", *_FACTORS):
        if keys.get(name) is not None:
            check_number(name, keys[name], float if name in _FACTORS else int)
    return keys


def layers_of(keys: Mapping[str, Any]) -> range:
    """The numbers of the layers. Raises KeyError where nothing says how many, ModelError for what is no such number."""
    check_number("num_hidden_layers", keys["num_hidden_layers"], int)
    if keys["num_hidden_layers"] > _MAX_LAYERS:
        raise ModelError(f"key 'num_hidden_layers' is {keys['num_hidden_layers']}, not a number of layers")
    return range(keys["num_hidden_layers"])


def check_number(name: str, value: Any, kind: type[int] | type[float]) -> None:
    """Raise ModelError unless the value of a key is a number of the kind above 0."""
    is_number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    if not (is_number and value > 0):
        wanted = "whole number" if kind is int else "number"
        raise ModelError(f"key {name!r} is {value!r}, not a {wanted} above 0; download the model again")
