"""A directory's safetensors as a list of tensors: which files, and where in them each tensor lies.

Only headers are read here, and torn files, pickles and gaps in the index are refused before anything large is touched.
Knows nothing of models.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from bulkrun.errors import ModelError, shortened
from bulkrun.models.safetensors_header import read_header

_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_LONGEST_NAME = 255  # bytes, of any file system
_LENGTH = struct.Struct("<Q")  # before the header stands its length
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


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model's directory: the whole one, else those of the index, else the one there is.

    An index beside a whole file is older, of shards that are gone or stale: transformers passes over it as well.
    Raises ModelError where files are missing, or there are only pickles, which could run code.
    """
    whole, index = path / "model.safetensors", path / _INDEX
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _indexed_files(index)
    files = sorted(path.glob("*.safetensors"))
    if len(files) == 1:
        return files
    if len(files) > 1:
        raise ModelError(f"{path}: {len(files)} safetensors files but no {_INDEX}; download the model again")
    pickles = sorted(p.name for pattern in _PICKLES for p in path.glob(pattern))
    if pickles:
        raise ModelError(
            f"{path}: weights only as pickle ({', '.join(pickles[:3])}), which can run code and is refused; convert "
            "them where you trust them: AutoModelForCausalLM.from_pretrained(path).save_pretrained(new_path)"
        )
    raise ModelError(f"{path}: no *.safetensors; download the model's weights")


def stored_tensors(files: Iterable[Path]) -> Iterator[StoredTensor]:
    """Every tensor of the files, one after the other as they lie there. Raises ModelError for a torn file."""
    for file in files:
        yield from sorted(_tensors_of(file), key=lambda tensor: tensor.offset)


def _tensors_of(file: Path) -> Iterator[StoredTensor]:
    raw = read_header(file)
    _check(file)
    first = _LENGTH.size + len(raw)
    for name, entry in json.loads(raw).items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(f"{file}: tensor {name} holds {entry['dtype']}: such weights are not supported")
        begin, end = entry["data_offsets"]
        yield StoredTensor(file, name, dtype, tuple(entry["shape"]), first + begin, end - begin)


def _check(file: Path) -> None:
    """Have safetensors check the header against the file: sizes, gaps, overlaps."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise ModelError(f"{file}: torn or damaged ({error}); download it again") from None


def _indexed_files(index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a safetensors index ({error!r}); download it again") from None
    for name in map(str, names):
        file, too_long = index.parent / name, len(name.encode("utf-8", "surrogatepass")) > _LONGEST_NAME
        if file.parent != index.parent or too_long or not file.is_file():
            shown = index.parent / shortened(name, _LONGEST_NAME)
            raise ModelError(f"{shown}: named in {index.name} but not there; download it again")
    return [index.parent / name for name in names]
