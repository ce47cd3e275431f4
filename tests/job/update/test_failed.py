"""Which rows a retry runs, as picks of its input."""

from __future__ import annotations

import numpy as np
import pytest

from bulkrun.job.update import failed
from bulkrun.job.update.failed import picks_of


def test_each_row_is_picked_once_at_its_own_place_and_keeps_its_successes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failed, "_PICKS_PER_BATCH", 2)
    picks = [pick for batch in picks_of(np.array([1, 4, 5, 8, 9], np.int64)) for pick in batch.to_pylist()]
    assert [(pick["position"], pick["row"]) for pick in picks] == [(row, row) for row in (1, 4, 5, 8, 9)]
    assert all(pick["keep_success"] for pick in picks)
