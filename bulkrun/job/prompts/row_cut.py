"""How a row has its own prompt cut. `fit` cuts."""

from __future__ import annotations

from typing import Literal, NamedTuple

Cut = Literal["truncate_left", "truncate_right"]  # which side goes


class RowCut(NamedTuple):
    """What one row says of it: to `most` tokens; None: to what the model takes."""

    how: Cut
    most: int | None = None
