"""Safetensors files as a list of tensors: where in them each one lies.

Only headers are read here, and torn files are refused before anything large is touched. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from bulkrun.errors import ModelError
from bulkrun.models.files.safetensors_header import data_start, read_header, tensor_entries

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredTensor(NamedTuple):
    """A tensor in a file: contiguous, little-endian."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int


def stored_tensors(files: Iterable[Path]) -> Iterator[StoredTensor]:
    """Every tensor of the files, one after the other as they lie there. Raises ModelError for a torn file."""
    for file in files:
        yield from sorted(_tensors_of(file), key=lambda tensor: tensor.offset)


def _tensors_of(file: Path) -> Iterator[StoredTensor]:
    raw = read_header(file)
    _check(file)
    for name, entry in tensor_entries(raw).items():
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(
                f"{file}: tensor {name} holds {entry['dtype']}: such weights, quantized ones, are not "
                "supported; use the model's bfloat16, float16 or float32 checkpoint"
            )
        begin, end = entry["data_offsets"]
        yield StoredTensor(file, name, dtype, tuple(entry["shape"]), data_start(raw) + begin, end - begin)


def _check(file: Path) -> None:
    """Have safetensors check the header against the file: sizes, gaps, overlaps."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise ModelError(f"{file}: torn or damaged ({error}); download it again") from None
