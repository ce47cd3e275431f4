"""Whole runs without hard links: with exclusive renames where there are some, else refused before any work."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage import new_name
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.verify import verify_run
from tests.campaigns.mounts import mounted, why_no_fuse
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import job, make_rows, oracle, results, start

ROWS = make_rows(40)


def refuse(*_: Any) -> None:
    raise OSError(errno.EPERM, "no")


def test_a_run_without_hard_links_gives_every_row_exactly_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    spec = job(tmp_path / "run")
    assert start(tmp_path / "run", ROWS, spec).totals is not None
    assert results(tmp_path / "run") == oracle(ROWS, spec)
    assert verify_run(RunDir(tmp_path / "run")).ok
    assert not list(RunDir(tmp_path / "run").tmp.iterdir())


def test_a_run_that_cannot_publish_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(new_name, "_RENAME_NOREPLACE", 1 << 20)
    engine = FakeEngine()
    with pytest.raises(RunError, match=r"neither hard links nor exclusive renames.*choose an output.path on another"):
        start(tmp_path / "run", ROWS, job(tmp_path / "run"), engine=engine)
    assert not engine.seen and not any(RunDir(tmp_path / "run").plan.iterdir())


def test_a_mounted_file_system_without_hard_links_works_or_is_refused_before_any_work(tmp_path: Path) -> None:
    if missing := why_no_fuse():
        pytest.skip(missing)
    (tmp_path / "disk").mkdir()
    with mounted(
        "tests.campaigns.no_links_fs", tmp_path / "mnt", str(tmp_path / "disk"), str(tmp_path / "mnt")
    ) as root:
        (root / "a").touch()
        with pytest.raises(PermissionError):
            os.link(root / "a", root / "b")
        spec, engine = job(root / "run"), FakeEngine()
        try:
            start(root / "run", ROWS, spec, engine=engine)
        except RunError as refused:
            assert "neither hard links nor exclusive renames" in str(refused) and not engine.seen
            return  # this FUSE library knows no flags of renames
        assert results(root / "run") == oracle(ROWS, spec)
