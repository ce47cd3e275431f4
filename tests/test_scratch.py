"""Folders for a while: those of the dead go with the next one, those of everybody else stay."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bulkrun import scratch
from bulkrun.data.inputs.reader import open_input
from bulkrun.scratch import Scratch, sweep

KILLED = "; os.kill(os.getpid(), signal.SIGKILL)"


def killed(code: str, folder: Path) -> None:
    """Run Python whose temporary files are in `folder` and that ends by kill -9."""
    code = f"import os, signal; {code}{KILLED}"
    ended = subprocess.run([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(folder)}, check=False)
    assert ended.returncode == -9


def dead(folder: Path, number: int = 0, *, machine: str | None = None, boot: str | None = None) -> tuple[Path, Path]:
    """What a killed process leaves: its lock, which nobody holds, and its folder."""
    here = scratch._this_machine()
    name = f"bulkrun-scratch-{machine or here[0]}-{boot or here[1]}-{number:016x}"
    (folder / name).mkdir()
    (folder / name / "input.snapshot").write_text("rows")
    (folder / f"{name}.lock").touch()
    return folder / name, folder / f"{name}.lock"


def test_a_folder_is_empty_and_goes_with_all_in_it(tmp_path: Path) -> None:
    with Scratch(tmp_path) as folder:
        assert folder.parent == tmp_path and not [*folder.iterdir()] and folder.stat().st_mode & 0o777 == 0o700
        (folder / "deep").mkdir()
        (folder / "deep" / "file").touch()
    assert not [*tmp_path.iterdir()]


def test_a_forgotten_folder_goes_too(tmp_path: Path) -> None:
    Scratch(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_next_folder_removes_that_of_a_killed_process_and_no_living_one(tmp_path: Path) -> None:
    with Scratch(tmp_path) as living:
        (living / "rows").touch()
        killed("from bulkrun.scratch import *; folder = Scratch(); (folder.path / 'rows').touch()", tmp_path)
        assert len([*tmp_path.glob("*/rows")]) == 2
        with Scratch(tmp_path):
            assert [*tmp_path.glob("*/rows")] == [living / "rows"]
    assert not [*tmp_path.iterdir()]


def test_the_snapshot_of_a_killed_plan_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, place = tmp_path / "rows.jsonl", tmp_path / "tmp"
    rows.write_text('{"id": 1}\n')
    place.mkdir()
    query = "SELECT * FROM input"
    killed(f"from bulkrun.data.inputs.reader import *; kept = open_input({str(rows)!r}, sql={query!r})", place)
    assert [*place.glob("*/input.snapshot")]
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with open_input(str(rows), sql=query):
        assert len([*place.glob("*/input.snapshot")]) == 1
    assert not [*place.iterdir()]


def test_what_else_lies_there_stays(tmp_path: Path) -> None:
    (tmp_path / "bulkrun-results").mkdir()
    (tmp_path / "bulkrun-scratch-mine").mkdir()
    (tmp_path / "bulkrun-scratch-mine.lock").touch()
    sweep(tmp_path)
    assert len([*tmp_path.iterdir()]) == 3


def test_other_machines_stay_whose_locks_a_network_disk_may_not_show(tmp_path: Path) -> None:
    """Another boot of this machine is over, and another name in this boot is a container."""
    other = dead(tmp_path, 1, machine="a" * 8, boot="b" * 8)
    dead(tmp_path, 2, boot="b" * 8)
    dead(tmp_path, 3, machine="a" * 8)
    sweep(tmp_path)
    assert {*tmp_path.iterdir()} == {*other}


def test_machines_that_do_not_tell_their_boot_are_not_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "boot_id", lambda: "")
    dead(tmp_path, 1, machine="a" * 8)
    dead(tmp_path, 2)
    sweep(tmp_path)
    assert len([*tmp_path.iterdir()]) == 2


def test_other_users_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, _ = dead(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    sweep(tmp_path)
    assert kept.exists()
    monkeypatch.undo()
    elsewhere = kept.rename(tmp_path / "elsewhere")
    kept.symlink_to(elsewhere)
    sweep(tmp_path)
    assert (elsewhere / "input.snapshot").exists()


def test_without_locks_folders_are_made_and_none_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    left, _ = dead(tmp_path)
    with Scratch(tmp_path) as first, Scratch(tmp_path) as second:
        assert first.is_dir() and second.is_dir() and left.is_dir()
    assert not first.exists() and not second.exists()


def test_a_lock_that_a_sweep_took_before_its_owner_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, seen = fcntl.flock, list[Path]()

    def late(lock: int, how: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        seen.extend(tmp_path.iterdir())
        sweep(tmp_path)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with Scratch(tmp_path) as folder:
        (lock,) = tmp_path.glob("*.lock")
        assert [lock] != seen and folder.is_dir()
        sweep(tmp_path)
        assert folder.is_dir()


def test_sweeps_beside_each_other_remove_all(tmp_path: Path) -> None:
    for number in range(100):
        dead(tmp_path, number)
    with Scratch(tmp_path) as living:
        sweeps = [threading.Thread(target=sweep, args=[tmp_path]) for _ in range(4)]
        for one in sweeps:
            one.start()
        for one in sweeps:
            one.join()
        assert {*tmp_path.iterdir()} == {living, living.with_name(f"{living.name}.lock")}


def test_a_folder_that_could_not_be_removed_keeps_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead(tmp_path)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    sweep(tmp_path)
    assert len([*tmp_path.iterdir()]) == 2
    monkeypatch.undo()
    sweep(tmp_path)
    assert not [*tmp_path.iterdir()]
