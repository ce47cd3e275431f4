"""Processes of bulkrun that are real but for the model: what they answer is the rule of `fake_engine`.

For tests of what happens around a model. Workers on the bundled one are those of `tests/campaigns/test_kill_submit.py`,
`tests/launch/test_deterministic_job.py` and the first test of `tests/launch/test_workers.py`, among others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_SITE = Path(__file__).parent / "no_model"
_ROOT = Path(__file__).resolve().parents[2]


def without_model(step_s: float = 0.0, load_s: float = 0.0) -> dict[str, str]:
    """Variables for processes that are started, and all that these start: how long a step and the loading take."""
    places = [str(_SITE), str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    lengths = {"BULKRUN_TEST_STEP_S": str(step_s), "BULKRUN_TEST_LOAD_S": str(load_s)}
    return {"PYTHONPATH": os.pathsep.join(places), **lengths}


def start_without_model(patch: pytest.MonkeyPatch) -> None:
    """So for all processes that are started from here on."""
    for name, value in without_model().items():
        patch.setenv(name, value)
