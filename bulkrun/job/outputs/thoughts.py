"""A reasoning model's output in two: its thoughts and its answer. Knows text and markers only.

The thoughts end at the first end marker. Their start marker may be the first thing in the output, or the last thing in
the prompt (chat templates of reasoning models write it there), or be missing: whatever stands before an end marker was
a thought. Line breaks around thoughts and answer belong to neither.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from bulkrun.request import Thinking


class Thoughts(NamedTuple):
    """An output in two. `response` is None when the output ended before its thoughts did."""

    reasoning: str | None
    response: str | None


def split_thoughts(text: str, thinking: Thinking, *, began_before: bool) -> Thoughts:
    """Split an output. `began_before`: the start marker came before the text (the prompt ends with it)."""
    before, end, after = text.partition(thinking.end)
    opened = before.lstrip().startswith(thinking.start)
    thoughts = before.lstrip().removeprefix(thinking.start).strip("\r\n")
    if end:
        return Thoughts(thoughts, after.lstrip("\r\n"))
    if opened or began_before:
        return Thoughts(thoughts, None)
    return Thoughts(None, text)


def span_of(marker: str, pieces: Sequence[str]) -> slice | None:
    """The tokens that a marker stands in, given the text of each; None where it is not there."""
    at = "".join(pieces).find(marker)
    if at < 0 or not marker:
        return None
    ends = [*accumulate(map(len, pieces))]
    return slice(bisect_right(ends, at), bisect_left(ends, at + len(marker)) + 1)
