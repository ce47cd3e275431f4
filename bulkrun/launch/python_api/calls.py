"""What the classes of the Python API have in common: the engine's settings, and how a call hands out its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike, fspath
from typing import Any, NamedTuple, TypedDict, TypeVar

from bulkrun.settings import Batching, Device, Dtype, KVCacheDtype, LoadFormat, Quantization

_O = TypeVar("_O")


class EngineSettings(TypedDict, total=False):
    """The keys of a job file's `engine` section, which has their descriptions and defaults."""

    device: Device
    dtype: Dtype
    load_format: LoadFormat
    adapter: str | PathLike[str] | None
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    gpu_memory_utilization: float
    kv_cache_memory_bytes: int
    kv_cache_dtype: KVCacheDtype
    quantization: Quantization | None
    deterministic: bool
    enable_prefix_caching: bool
    batching: Batching
    batching_window_s: float
    async_scheduling: bool | None
    enforce_eager: bool


def engine_section(given: EngineSettings) -> dict[str, Any]:
    """The section of a job file: paths are text there."""
    return {key: fspath(value) if isinstance(value, PathLike) else value for key, value in given.items()}


class Shown(NamedTuple):
    """How outputs are handed out: in the order of the prompts or as they end, and whether a bar counts them."""

    ordered: bool
    use_tqdm: bool

    def counted(self, outputs: Iterator[_O], total: int | None) -> Iterator[_O]:
        """The outputs, counted on a bar where that is wanted and stderr is a terminal."""
        if not self.use_tqdm:
            return outputs
        from tqdm import tqdm

        return iter(tqdm(outputs, total=total, unit=" prompts", disable=None))
