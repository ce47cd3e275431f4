"""What layers are told of a token anew (Gemma 3n and 4). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class LayerInputs(NamedTuple):
    """What each layer is told of a token anew, by an embedding of its own."""

    size: int
    vocab_size: int  # tokens beyond it are told what the first one is


def layer_inputs_of(keys: Mapping[str, Any]) -> LayerInputs | None:
    """Those that the keys of a config.json ask for, if any."""
    size = keys.get("layer_input_size")
    return None if size is None else LayerInputs(size, keys["layer_input_vocab_size"])
