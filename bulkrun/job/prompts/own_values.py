"""A row's own values as its shard has them, one JSON text: how it is sampled, its adapter, how its tokens divide."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

ADAPTER, PARTS = "adapter", "parts"  # beside the sampling values


class OwnValues(NamedTuple):
    """Of one row. `adapter`: that of its model, "" for none. `parts`: of a row of several texts how many tokens each
    has."""

    sampling: dict[str, Any]
    adapter: str = ""
    parts: tuple[int, ...] = ()


def own_values(overrides: str | None) -> OwnValues:
    """The values of a shard's text."""
    if overrides is None:
        return OwnValues({})
    values: dict[str, Any] = json.loads(overrides)
    adapter, parts = values.pop(ADAPTER, ""), values.pop(PARTS, ())
    return OwnValues(values, adapter, tuple(parts))
