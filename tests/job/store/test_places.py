"""Where the state of a run is whose results go to a bucket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bulkrun.errors import JobFileError, UsageError
from bulkrun.job.store.places import refuse_odd_place, run_dir_of


def test_without_a_home_the_user_says_where_the_state_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # that no passwd knows
    with pytest.raises(UsageError, match=r"s3://b/out: there is no home directory for its state; set output\.state"):
        run_dir_of("s3://b/out", None)
    assert str(run_dir_of("s3://b/out", "state").root) == "state"


def test_a_folder_that_no_parquet_reader_can_name_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(JobFileError, match=r"output\.path: '.*/caf\\udce9/out' is not UTF-8.*rename the folder"):
        refuse_odd_place(run_dir_of("out", None))
