"""How a line has its own prompt cut: vLLM's `truncate_prompt_tokens` and `truncation_side`, OpenAI's `truncation`.

The start of what is continued goes, else the end, as in vLLM. Knows bodies; `fit` cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bulkrun.job.prompts.body_keys import CUT, CUT_OF_RESPONSE, CUT_SIDE, BadBody, whole_number
from bulkrun.job.prompts.conversations import shown
from bulkrun.job.prompts.row_cut import Cut, RowCut

_OF_RESPONSE = {"disabled": None, "auto": RowCut("truncate_left")}
_SIDES: dict[str, Cut] = {"left": "truncate_left", "right": "truncate_right"}


def cut_of(body: Mapping[str, Any], *, generates: bool) -> RowCut | None:
    """What a body without nulls says of it; None: nothing, and the job's `run.on_too_long` holds. Raises BadBody."""
    if CUT_OF_RESPONSE in body:
        return _of_response(body[CUT_OF_RESPONSE])
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


def _of_response(wanted: Any) -> RowCut | None:
    """OpenAI drops whole items from the start of a conversation, vLLM so many tokens, and so does this."""
    if not isinstance(wanted, str) or wanted not in _OF_RESPONSE:
        raise BadBody(f"body.{CUT_OF_RESPONSE}: {shown(wanted)} is not one of {', '.join(_OF_RESPONSE)}")
    return _OF_RESPONSE[wanted]
