"""The head of a safetensors file that is damaged: a message, whatever stands in it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bulkrun.errors import ModelError
from bulkrun.models.files.safetensors_header import refuse_torn


@pytest.mark.parametrize("header", [b"[1]", b'{"a": 1}', b'{"\xff": 1}', b"{" * 9, b"[" * 5000 + b"]" * 5000])
def test_a_header_that_is_none_is_named(header: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match=r"model\.safetensors: torn or damaged \(its header: "):
        refuse_torn(file)
