"""The verbs of `durable` that work on whole directories."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage import exchange
from bulkrun.data.storage.exchange import can_exchange, exchange_dirs, link_tree
from bulkrun.errors import RunError


def test_two_directories_swap_names_and_neither_is_ever_missing(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for path in (one, other):
        path.mkdir()
        (path / "name").write_text(path.name)
    missing, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            missing.extend(path for path in (one, other) if not (path / "name").exists())

    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(501):
        exchange_dirs(one, other)
    stop.set()
    thread.join()
    assert (one / "name").read_text() == "other" and (other / "name").read_text() == "one" and not missing


def test_an_exchange_that_fails_names_the_directory_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with pytest.raises(RunError, match=r"one: exchanging it with its successor failed: No such file"):
        exchange_dirs(tmp_path / "one", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_the_probe_tells_what_the_file_system_can_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert can_exchange(tmp_path)
    monkeypatch.setattr(exchange, "_RENAME_EXCHANGE", 1 << 20)  # as a kernel that does not know the flag
    assert not can_exchange(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.ENOSPC])
def test_a_disk_that_fails_is_not_a_file_system_that_cannot(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(os, "link", fail)
    with pytest.raises(
        RunError, match=f"trying what the file system can do failed: {os.strerror(number)}; .*same comm"
    ):
        can_exchange(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_probe_is_removed_though_one_call_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink, fails = os.unlink, iter([True])

    def fail_once(*given: Any, **where: Any) -> None:
        if next(fails, False):
            raise OSError(errno.EIO, "no")
        unlink(*given, **where)

    monkeypatch.setattr(os, "unlink", fail_once)
    assert can_exchange(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_linked_tree_has_the_same_files_modes_and_links_but_what_is_not_wanted(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "deep" / "er").mkdir(parents=True)
    (source / "deep").chmod(0o700)
    (source / "deep" / "er" / "file").write_text("x")
    (source / "secret").write_text("no")
    (source / "deep" / "away").symlink_to("/nowhere")
    link_tree(source, target, lambda path: path.name != "secret")
    found = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert found == {"deep", "deep/er", "deep/er/file", "deep/away"}
    assert (target / "deep/er/file").samefile(source / "deep/er/file") and (target / "deep/away").is_symlink()
    assert (target / "deep").stat().st_mode & 0o777 == 0o700
