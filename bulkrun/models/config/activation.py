"""What is between the projections of a decoder's MLPs. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.family import Family

_GELUS = {"gelu": "gelu"} | dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast"), "gelu_tanh")
_ACTIVATIONS = {"silu": "silu", "relu2": "relu2", "xielu": "xielu", **_GELUS}


def activation_of(keys: Mapping[str, Any], family: Family) -> str:
    """Its name here. Raises ModelError for one that the family does not have."""
    name = "hidden_activation" if "hidden_activation" in keys else "hidden_act"
    expected = family.keys.get(name, "silu")
    given = keys[name] or expected  # Gemma's files may say null
    if not family.has_mlp_gates and given in _GELUS and expected in _GELUS:
        return _ACTIVATIONS[given]
    of_the_first = (name, given, expected) == ("hidden_act", "gelu", "gelu_pytorch_tanh")  # Gemmas, which meant this
    if given != expected and not of_the_first:
        raise ModelError(f"{name} {given!r} is not supported; {expected} is")
    return _ACTIVATIONS[expected]
