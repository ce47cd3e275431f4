"""What the parts of a run come to, held against the totals that its `_SUCCESS` tells."""

from __future__ import annotations

from collections.abc import Sequence

from bulkrun.data.results.parts import PartInfo
from bulkrun.job.store.run_record import RunRecord
from bulkrun.job.store.run_totals import RunTotals
from bulkrun.job.work.finish import sum_parts

_COUNTED = (
    *("run_id", "status", "rows", "samples", "ok", "errors", "parts"),
    *("prompt_tokens", "completion_tokens", "saved_generations", "cached_tokens", "stopped", "cut"),
)


def differences(told: RunTotals, record: RunRecord, parts: Sequence[PartInfo]) -> list[str]:
    """A line for each number that `_SUCCESS` tells otherwise than the footers of the parts that could be read."""
    found = sum_parts(record, parts)
    pairs = {name: (getattr(told, name), getattr(found, name)) for name in _COUNTED}
    return [f"_SUCCESS: {name}: {got!r}, found {want!r}" for name, (got, want) in pairs.items() if want != got]
