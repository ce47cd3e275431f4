"""How a job differs from the one that a run was started with, in words: a line for each key, old value and new one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from bulkrun.errors import shortened
from bulkrun.job.store.fingerprint import job_key

_SHOWN_CHARS = 63  # of each value
_CONTEXT_CHARS = 20  # before the place where two long values part


def difference_lines(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    """A line for each key of a difference: the old value and the new one, each cut to what fits."""
    return [
        f"  {job_key(key)}: {_files_difference(old, new) if key == 'input.files' else _difference(old, new)}"
        for key, (old, new) in changed.items()
    ]


def _difference(old: Any, new: Any) -> str:
    """Both values; of long ones what comes where they part."""
    texts = repr(old), repr(new)
    parted = (at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
    is_long = max(map(len, texts)) > _SHOWN_CHARS
    start = max(0, next(parted, min(map(len, texts))) - _CONTEXT_CHARS) if is_long else 0
    before, now = (("..." if start else "") + shortened(text[start:], _SHOWN_CHARS) for text in texts)
    return f"{before} -> {now}"


def _files_difference(old: Sequence[Sequence[Any]] | None, new: Sequence[Sequence[Any]] | None) -> str:
    """How many files are others; a record has no names of them."""
    before, now = (Counter(map(tuple, files or ())) for files in (old, new))
    others = (now - before).total()
    what = f", {others:,} new or changed" if others else ", in another order" if before == now else ""
    return f"{before.total():,} -> {now.total():,} files{what}"
