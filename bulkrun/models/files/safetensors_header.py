"""The head of a safetensors file: what is in it, without the weights and without torch."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError, shortened
from bulkrun.models.files.read_errors import read_errors

_LENGTH = struct.Struct("<Q")  # before the header stands its length
_MAX_HEADER_BYTES = 100 * 2**20
_FLOAT_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def read_header(file: Path) -> bytes:
    """The JSON header of a safetensors file. Raises ModelError where the file is torn or no safetensors file."""
    with read_errors(file), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        prefix = stream.read(_LENGTH.size)
        length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else -1
        if not 0 < length <= min(size - _LENGTH.size, _MAX_HEADER_BYTES):
            raise ModelError(f"{file}: torn or not a safetensors file ({size} bytes); download it again")
        return stream.read(length)


def tensor_entries(raw: bytes) -> dict[str, dict[str, Any]]:
    """What a header says of each tensor, by name: dtype, shape and data_offsets. Raises ValueError for no JSON."""
    entries: dict[str, dict[str, Any]] = json.loads(raw)
    entries.pop("__metadata__", None)
    return entries


def data_start(raw: bytes) -> int:
    """Where in the file the numbers begin, from which data_offsets count."""
    return _LENGTH.size + len(raw)


def refuse_torn(file: Path) -> None:
    """Raise ModelError unless the file goes as far as its header says."""
    raw = read_header(file)
    with read_errors(file):
        size = file.stat().st_size
    try:
        ends = [entry["data_offsets"][1] for entry in tensor_entries(raw).values()]
        expected = data_start(raw) + max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{file}: torn or damaged (its header: {shortened(repr(error), 200)}); download it again"
        ) from None
    if size < expected:
        raise ModelError(f"{file}: torn: {size} bytes of {expected}; download it again")


def stored_shapes(file: Path) -> dict[str, list[int]]:
    """The shape of each tensor of a whole file, by name. Raises ModelError for a torn one."""
    return {name: entry["shape"] for name, entry in tensor_entries(read_header(file)).items()}


def stored_places(file: Path) -> dict[str, tuple[int, int]]:
    """From where to where in the file each tensor of a whole file lies, by name. Raises ModelError for a torn one."""
    raw = read_header(file)
    start, offsets = data_start(raw), {name: entry["data_offsets"] for name, entry in tensor_entries(raw).items()}
    return {name: (start + begin, start + end) for name, (begin, end) in offsets.items()}


def stored_dtype(folder: Path) -> str | None:
    """What most of the folder's weights are stored in, of what a model can run in; None where there are none."""
    num_bytes: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        for entry in tensor_entries(read_header(file)).values():
            if entry.get("dtype") in _FLOAT_NAMES:
                begin, end = entry["data_offsets"]
                num_bytes[_FLOAT_NAMES[entry["dtype"]]] += end - begin
    return max(num_bytes, key=num_bytes.__getitem__, default=None)
