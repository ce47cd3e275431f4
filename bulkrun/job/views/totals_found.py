"""What the parts of a run come to, held against the totals that its `_SUCCESS` tells."""

from __future__ import annotations

from typing import NamedTuple

from bulkrun.job.store.run_totals import RunTotals

_NAMES = ("run_id", "rows", "parts", "output rows", "errors")


class TotalsFound(NamedTuple):
    """Counts of what is there; `rows` are input rows (None where no plan tells), `errors` output rows by code."""

    run_id: str
    rows: int | None
    parts: int
    output_rows: int
    errors: dict[str, int]

    def differences(self, told: RunTotals) -> list[str]:
        """A line for each number that `_SUCCESS` tells otherwise."""
        output_rows = told.ok + sum(told.errors.values())
        as_told = TotalsFound(told.run_id, told.rows, told.parts, output_rows, told.errors)
        triples = zip(_NAMES, as_told, self, strict=True)
        return [f"_SUCCESS: {what}: {got!r}, found {want!r}" for what, got, want in triples if want != got]
