"""What an engine is given: the settings of a job file's `engine` section, with their defaults. Names are vLLM's.

Standard library only: the job column describes them to users, the tensor column works with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
KVCacheDtype = Literal["auto", "bfloat16", "float16", "float32", "fp8"]
LoadFormat = Literal["auto", "dummy"]
Quantization = Literal["fp8", "int8"]
Batching = Literal["continuous", "static", "dynamic"]
Task = Literal["generate", "embed", "classify"]
Pooling = Literal["cls", "mean", "last"]
ScoreActivation = Literal["softmax", "sigmoid", "none"]

# What None stands for, where neither model nor memory decide.
DEFAULT_BLOCK_SIZE = 16
MIN_MODEL_LEN = 2  # a prompt token and an output token
DEFAULT_MAX_NUM_SEQS: Mapping[str, int] = MappingProxyType({"cpu": 128, "cuda": 1024})
DEFAULT_ENCODER_TOKENS = 32_768  # of a step on a GPU: a small encoder's takes less time than to launch it
DEFAULT_MAX_NUM_BATCHED_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 1024, "cuda": 8192})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineArgs:
    """Settings as they were asked for. None: the engine finds the value when it is loaded."""

    device: Device = "auto"
    dtype: Dtype = "auto"
    load_format: LoadFormat = "auto"
    adapter: Path | None = None  # a LoRA adapter's directory
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    quantization: Quantization | None = None
    deterministic: bool = False
    enable_prefix_caching: bool = True
    batching: Batching = "continuous"
    batching_window_s: float = 0.05
    enforce_eager: bool = False
    async_scheduling: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingArgs:
    """How the hidden states of a text's tokens become one vector. None: as the model's own files say."""

    pooling: Pooling | None = None  # the first token's, the mean over all tokens, the last token's
    normalize: bool | None = None  # to a length of 1
    dimensions: int | None = None  # the first so many, of models trained for that; cut before it is normalized


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationArgs:
    """How what a classifier makes of a text becomes scores. None: as the model's own files say."""

    activation: ScoreActivation | None = None  # over all labels together, each by itself, or as they come
    # Texts are pairs, told apart by token types: what is behind a text's first token of this id is of the second type.
    pair_separator: int | None = None


DEFAULTS = EngineArgs()

# Keys that do nothing for an engine that embeds or classifies, and whoever sets them expects something: each with why.
NOT_FOR_EMBEDDING: Mapping[str, str] = MappingProxyType(
    {
        "kv_cache_dtype": "nothing of a text is kept once it was read, so there is no KV cache",
        "kv_cache_memory_bytes": "nothing of a text is kept once it was read, so there is no KV cache",
        "batching": "a text takes one step, so there is no running batch to join",
    }
)
