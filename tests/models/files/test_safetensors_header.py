"""The head of a safetensors file that is damaged: a message, whatever stands in it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from bulkrun.errors import ModelError
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.safetensors_header import refuse_torn


@pytest.mark.parametrize("header", [b"[1]", b'{"a": 1}', b'{"\xff": 1}', b"{" * 9, b"[" * 5000 + b"]" * 5000])
def test_a_header_that_is_none_is_named(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match=r"model\.safetensors: torn or damaged \(its header: "):
        refuse_torn(file)


@pytest.mark.parametrize("second", [(4, 12), (12, 20), (8, 12)], ids=["overlap", "gap", "short"])
def test_tensors_that_do_not_lie_side_by_side_are_damage(second: tuple[int, int], tmp_path: Path) -> None:
    places = {"a": (0, 8), "b": second}
    header = json.dumps({name: {"dtype": "F32", "shape": [2], "data_offsets": at} for name, at in places.items()})
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(second[1]))
    with pytest.raises(ModelError, match=r"model\.safetensors: torn or damaged \("):
        list(stored_tensors([file]))
