"""Where the state of a run is whose results go to a bucket."""

from __future__ import annotations

import os

import pytest

from bulkrun.errors import UsageError
from bulkrun.job.store.places import run_dir_of


def test_without_a_home_the_user_says_where_the_state_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_STATE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # that no passwd knows
    with pytest.raises(UsageError, match=r"s3://b/out: there is no home directory for its state; set output\.state"):
        run_dir_of("s3://b/out", None)
    assert str(run_dir_of("s3://b/out", "state").root) == "state"
