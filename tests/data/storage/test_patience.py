"""Pauses between tries grow up to a limit, and patience ends before a pause that would exceed it."""

from __future__ import annotations

import pytest

from bulkrun.data.storage import patience
from bulkrun.data.storage.patience import Patience


@pytest.mark.parametrize(("in_all_s", "pauses"), [(40.0, [1, 2, 4, 8, 8, 8, 8]), (0.5, []), (1.0, [1])])
def test_pauses_double_up_to_the_longest_until_patience_ends(
    monkeypatch: pytest.MonkeyPatch, in_all_s: float, pauses: list[float]
) -> None:
    clock, waited = [0.0], list[float]()

    def wait(pause_s: float) -> None:
        waited.append(pause_s)
        clock[0] += pause_s

    monkeypatch.setattr(patience.time, "monotonic", lambda: clock[0])
    patient = Patience(8.0, in_all_s)
    while not patient.is_over:
        patient.pause(wait)
    assert waited == pauses
