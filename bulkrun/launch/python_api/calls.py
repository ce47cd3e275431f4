"""What the classes of the Python API have in common: the engine's settings, and how a call hands out its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, NamedTuple, TypedDict, TypeVar

from bulkrun.errors import UsageError, shown_value
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


def refuse_one(given: Any, of: str) -> None:
    """Raise UsageError for what is no list or iterator of what a call takes; `of` says that in a few words.

    Some could be gone through and would give something else: bytes numbers, a mapping its keys, and a table of pandas
    or polars the names of its columns, which are texts.
    """
    if hasattr(given, "columns") and not isinstance(given, type):
        raise UsageError(f"a table is not a list or an iterator of {of}; give one of its columns: table['text']")
    if isinstance(given, str | bytes | bytearray | Mapping) or not isinstance(given, Iterable):
        raise UsageError(f"{shown_value(given)} is not a list or an iterator of {of}")


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
