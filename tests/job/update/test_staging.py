"""A change that fails while it is staged: nothing of it stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.data.storage.durable import disk_errors
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.update import staging


def test_no_file_is_open_any_more_when_what_was_staged_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS would keep it and its folder. The frames that hold it are those of the first error, not of what it became."""
    monkeypatch.setattr(staging, "refuse_lost_hold", lambda run: None)
    seen: list[str] = []

    def fail() -> None:
        half = (tmp_path / "half").open("wb")
        raise OSError(f"no room in {half.name}")

    def look(_: RunDir) -> None:
        seen.extend(str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())

    with pytest.raises(RunError, match="no room"), staging.removed_on_failure(RunDir(tmp_path), look):  # noqa: SIM117
        with disk_errors("writing", tmp_path):
            fail()
    assert seen and str(tmp_path / "half") not in seen
