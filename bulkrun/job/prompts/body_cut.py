"""How a line has its own prompt cut: vLLM's `truncate_prompt_tokens` and `truncation_side`.

The start of what is continued goes, else the end, as in vLLM. Knows bodies; `fit` cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.prompts.body_keys import CUT, CUT_SIDE, BadBody, whole_number
from bulkrun.job.prompts.conversations import shown
from bulkrun.job.prompts.row_cut import Cut, RowCut

_SIDES: dict[str, Cut] = {"left": "truncate_left", "right": "truncate_right"}


def cut_of(body: Mapping[str, Any], *, generates: bool) -> RowCut | None:
    """What a body without nulls says of it; None: nothing, and the job's `run.on_too_long` holds. Raises BadBody."""
    side = body.get(CUT_SIDE, "left" if generates else "right")
    if not isinstance(side, str) or side not in _SIDES:
        raise BadBody(f"body.{CUT_SIDE}: {shown(side)} is not one of {', '.join(_SIDES)}")
    if CUT not in body:
        return None
    most = whole_number(CUT, body[CUT])
    if most < 1 and most != -1:
        raise BadBody(
            f"body.{CUT}: {shown(most)} is neither -1 (what the model takes) nor a number of tokens from 1 on"
        )
    return RowCut(_SIDES[side], None if most == -1 else most)
