"""`_SUCCESS`: the totals of a finished run, whose being there is what makes it finished. Published once."""

from __future__ import annotations

import secrets
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from bulkrun.data.storage.documents import from_document
from bulkrun.data.storage.durable import encode_json, publish_new, read_json, write_file
from bulkrun.errors import EXIT_OK, EXIT_ROW_ERRORS
from bulkrun.job.store.run_dir import RunDir


@dataclass(frozen=True)
class RunTotals:
    """What `_SUCCESS` holds. `rows` are input rows; `ok` and `errors` count output rows (rows x samples).

    `saved_generations`, `cached_tokens`, `stopped` and `cut` are the sums over the parts' footers (`PartInfo`);
    `duplicate_ids` counts input rows whose id an earlier row has.

    With a `generation` above 0 (retry, incremental nights, compact) the parts are no longer those of the plan.
    `next_row` is then the first row number that was never given; `updates` says what each generation changed.
    """

    status: Literal["completed", "completed_with_errors"]
    rows: int
    samples: int
    ok: int
    errors: dict[str, int]
    prompt_tokens: int
    completion_tokens: int
    parts: int
    run_id: str
    started: str
    finished: str
    fingerprints: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    generation: int = 0
    next_row: int | None = None
    updates: list[dict[str, Any]] = field(default_factory=list)
    saved_generations: int = 0
    cached_tokens: int = 0
    stopped: int = 0
    cut: int = 0
    duplicate_ids: int = 0

    @property
    def exit_code(self) -> int:
        """That of the command which worked on the run to its end."""
        return EXIT_ROW_ERRORS if self.errors else EXIT_OK


def read_totals(run: RunDir) -> RunTotals | None:
    """The totals of a finished run, None while it is not finished. Raises RunError for those of a newer bulkrun."""
    document = read_json(run.success)
    if document is None:
        return None
    document.pop("nonce", None)
    return from_document(RunTotals, document, run.success, "totals")


def totals_document(totals: RunTotals) -> dict[str, Any]:
    """The contents of `_SUCCESS`."""
    return {**asdict(totals), "nonce": secrets.token_hex(8)}


def publish_totals(run: RunDir, totals: RunTotals) -> RunTotals:
    """Write `_SUCCESS` if there is none; returns the totals that are on disk."""
    document = totals_document(totals)
    tmp = run.tmp / f"success.{document['nonce']}.tmp"
    write_file(tmp, encode_json(document))
    publish_new(tmp, run.success)
    published = read_totals(run)
    assert published is not None, "_SUCCESS was just published"
    return published
