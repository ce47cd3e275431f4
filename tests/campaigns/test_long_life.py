"""A short slice of the walk over a run's whole life; the long form is a command (see the module)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.campaigns.kill_update import ROOT
from tests.s3_server import MODULES


def campaign(*options: str) -> dict[str, int]:
    """In a process of its own: it forks, which a process with threads must not."""
    command = [sys.executable, "-m", "tests.campaigns.long_life", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-5000:]
    tally: dict[str, int] = json.loads(done.stdout)
    return tally


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_life_of_nights_or_of_one_run_holds_what_a_dictionary_says(seed: int) -> None:
    tally = campaign("--only", str(seed), "--life", "12", "--bucket", "0")
    assert tally["lives"] == 1 and tally["retry"] > 0


def test_a_life_in_a_bucket_holds_what_its_directory_holds() -> None:
    if missing := [module for module in MODULES if importlib.util.find_spec(module) is None]:
        pytest.skip(f"needs {missing}")
    tally = campaign("--only", "1501", "--life", "8", "--bucket", "1")
    assert tally["buckets"] == 1 and tally["objects lost"] > 0


@pytest.mark.slow
def test_many_lives_hold_what_a_dictionary_says() -> None:
    assert campaign("--steps", "400", "--seed", "50")["lives"] == 10
