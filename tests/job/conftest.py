"""What tests of several stores share."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.job.store.run_dir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of which nothing is there but the folders of its workers and its claims."""
    run = RunDir(tmp_path)
    run.workers.mkdir(parents=True)
    run.claims.mkdir()
    return run
