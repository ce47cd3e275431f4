"""Where the state of a run is whose results go to a bucket."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bulkrun.data.storage.durable import make_dirs
from bulkrun.errors import JobFileError, UsageError
from bulkrun.job.store.places import find_run, refuse_odd_place, run_dir_of


def test_without_a_home_the_user_says_where_the_state_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # that no passwd knows
    with pytest.raises(UsageError, match=r"s3://b/out: there is no home directory for its state; set output\.state"):
        run_dir_of("s3://b/out", None)
    assert str(run_dir_of("s3://b/out", "state").root) == "state"


def test_the_state_of_a_bucket_is_that_of_one_store_and_found_without_asking_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    states = set()
    for store in ("http://127.0.0.1:9", "http://127.0.0.1:10"):
        monkeypatch.setenv("AWS_ENDPOINT_URL", store)
        run = run_dir_of("s3://b/out", None)
        make_dirs(run.state)
        run.run_json.touch()
        assert find_run("s3://b/out").root == find_run("s3://b/out/").root == run.root
        states.add(run.root)
    assert len(states) == 2 and all(state.is_relative_to(tmp_path) for state in states)


def test_a_folder_that_no_parquet_reader_can_name_is_no_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder := tmp_path / os.fsdecode(b"caf\xe9")).mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(JobFileError, match=r"output\.path: '.*/caf\\udce9/out' is not UTF-8.*rename the folder"):
        refuse_odd_place(run_dir_of("out", None))
