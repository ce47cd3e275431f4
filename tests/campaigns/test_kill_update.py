"""A short slice of the campaign against nights and retries; the long form is a command (see the module)."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.campaigns.kill_update import ROOT


def campaign(*options: str) -> dict[str, int]:
    """In a process of its own: it forks, which a process with threads must not."""
    command = [sys.executable, "-m", "tests.campaigns.kill_update", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    tally: dict[str, int] = json.loads(done.stdout)
    return tally


def test_killed_nights_and_retries_leave_every_row_exactly_once() -> None:
    tally = campaign("--kills", "4", "--rows", "20", "--seed", "3")
    assert tally["kills"] >= 4 and tally["reads"] > 0


@pytest.mark.slow
def test_many_killed_nights_and_retries_leave_every_row_exactly_once() -> None:
    assert campaign("--kills", "150")["retries"] > 0
