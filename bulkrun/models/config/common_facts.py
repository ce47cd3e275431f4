"""What every model's config.json says alike: the dtype of its weights and the tokens that end an output. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.architectures import text_part
from bulkrun.models.files.safetensors_header import stored_dtype

_DTYPES = ("bfloat16", "float16", "float32")


def with_dtype(raw: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """Where the file says nothing, or `auto`, it is what the weights are stored in, as in transformers."""
    text = text_part(raw)
    given = text.get("dtype") or text.get("torch_dtype") or "auto"
    return {**raw, "dtype": stored_dtype(path) or "float32"} if given == "auto" else raw


def common_facts(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What every config.json says alike: the dtype and the tokens that end an output. Raises ModelError."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise ModelError(f"dtype {name} is not supported; these are: {', '.join(_DTYPES)}")
    eos = raw.get("eos_token_id")
    eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    if not all(isinstance(token_id, int) for token_id in eos_token_ids):
        raise ModelError(f"key 'eos_token_id' is {eos!r}, neither a token id nor a list of them; fix or remove it")
    return {"eos_token_ids": eos_token_ids, "dtype": name}
