"""The file-system verbs under rivals, lost replies and full disks."""

from __future__ import annotations

import errno
import os
import threading
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage import durable, new_name
from bulkrun.data.storage.durable import (
    append_line,
    make_dirs,
    new_file,
    publish_new,
    read_json,
    remove_tree,
    replace_json,
    swap_in,
    write_file,
    write_new_json,
)
from bulkrun.errors import RunError
from tests.failing_disk import unreadable


def test_exactly_one_of_many_rivals_publishes(tmp_path: Path) -> None:
    for round_ in range(20):
        wins: list[int] = []
        barrier = threading.Barrier(8)

        def rival(me: int, final: Path = tmp_path / f"f{round_}", wins: list[int] = wins, at: Any = barrier) -> None:
            at.wait()
            if write_new_json(final, {"nonce": me}):
                wins.append(me)

        threads = [threading.Thread(target=rival, args=(me,)) for me in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1 and read_json(tmp_path / f"f{round_}") == {"nonce": wins[0]}
    assert len(list(tmp_path.iterdir())) == 20, "no temporary file stays"


@pytest.mark.parametrize("rival_first", [False, True])
def test_a_lost_reply_of_link_is_told_from_a_lost_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rival_first: bool
) -> None:
    write_file(tmp_path / "tmp", b"mine")
    if rival_first:
        write_file(tmp_path / "final", b"theirs")
    real = os.link

    def link_without_reply(source: Any, target: Any) -> None:
        if not rival_first:
            real(source, target)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "link", link_without_reply)
    assert publish_new(tmp_path / "tmp", tmp_path / "final") is not rival_first


def test_a_tmp_that_a_finished_runs_clean_up_took_is_a_lost_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "tmp", b"mine")
    write_file(tmp_path / "final", b"theirs")
    read_tail = durable._tail

    def sweep_first(path: Path) -> tuple[int, bytes]:
        (tmp_path / "tmp").unlink(missing_ok=True)  # the rival cleans up between our link() and our look at the tmp
        return read_tail(path)

    monkeypatch.setattr(durable, "_tail", sweep_first)
    assert publish_new(tmp_path / "tmp", tmp_path / "final") is False


@pytest.fixture
def no_hard_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EPERM, "no")

    monkeypatch.setattr(os, "link", refuse)


@pytest.mark.usefixtures("no_hard_links")
def test_without_hard_links_or_exclusive_renames_the_file_system_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_file(tmp_path / "tmp", b"x")
    monkeypatch.setattr(new_name, "_RENAME_NOREPLACE", 1 << 20)  # as a file system that does not know the flag
    with pytest.raises(RunError, match=r"neither hard links nor exclusive renames.*output.path"):
        publish_new(tmp_path / "tmp", tmp_path / "final")
    assert (tmp_path / "tmp").exists() and not (tmp_path / "final").exists()


@pytest.mark.usefixtures("no_hard_links")
def test_without_hard_links_of_many_writers_exactly_one_publishes(tmp_path: Path) -> None:
    for round_ in range(20):
        wins: list[int] = []

        def publish(writer: int, round_: int = round_, wins: list[int] = wins) -> None:
            tmp = tmp_path / f"tmp.{round_}.{writer}"
            write_file(tmp, b"%d" % writer)
            if publish_new(tmp, tmp_path / f"f{round_}"):
                wins.append(writer)

        threads = [threading.Thread(target=publish, args=(writer,)) for writer in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(wins) == 1 and (tmp_path / f"f{round_}").read_bytes() == b"%d" % wins[0]
    assert len(list(tmp_path.iterdir())) == 20, "no temporary file stays"


@pytest.mark.usefixtures("no_hard_links")
@pytest.mark.parametrize("rival_first", [False, True])
def test_a_lost_reply_of_an_exclusive_rename_is_told_from_a_lost_race(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rival_first: bool
) -> None:
    write_file(tmp_path / "tmp", b"mine")
    if rival_first:
        write_file(tmp_path / "final", b"theirs")
    real = new_name.renameat2

    def without_reply(source: Path, target: Path, flags: int) -> None:
        if not rival_first:
            real(source, target, flags)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(new_name, "renameat2", without_reply)
    assert publish_new(tmp_path / "tmp", tmp_path / "final") is not rival_first
    assert not (tmp_path / "tmp").exists()


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "quota"), (errno.EROFS, "read-only"), (errno.EIO, "check it")],
)
def test_disk_errors_say_which_file_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def fail(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(RunError, match=f"result.json.*{advice}"):
        write_new_json(tmp_path / "result.json", {})
    assert list(tmp_path.iterdir()) == [], "half a file is in the way on a full disk"


def test_replace_leaves_the_old_or_the_new_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f.json"
    replace_json(path, {"a": 1})
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "io")))
    for sync in (True, False):
        with pytest.raises(RunError):
            replace_json(path, {"a": 2}, sync=sync)
        assert read_json(path) == {"a": 1} and len(list(tmp_path.iterdir())) == 1


def test_read_json_refuses_what_is_not_a_json_object(tmp_path: Path) -> None:
    assert read_json(tmp_path / "missing") is None
    for junk in (b"", b'{"a": 1', b"[1]", b"\xff"):
        (tmp_path / "f").write_bytes(junk)
        with pytest.raises(RunError, match="another program"):
            read_json(tmp_path / "f")


def test_make_dirs_makes_the_last_one_private_and_is_repeatable(tmp_path: Path) -> None:
    for _ in range(2):
        make_dirs(tmp_path / "a/b/c", mode=0o700)
    assert (tmp_path / "a/b/c").stat().st_mode & 0o777 == 0o700


def test_lines_of_several_threads_do_not_mix(tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=lambda n=n: [append_line(tmp_path / "log", b"%d" % n * 50) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # one that another writer was at just then may have been taken for torn: readers skip an empty line
    lines = list(filter(None, (tmp_path / "log").read_bytes().splitlines()))
    assert len(lines) == 200 and all(len(set(line)) == 1 and len(line) == 50 for line in lines)


def test_a_short_write_is_finished_or_an_error_and_costs_the_next_line_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, room = os.write, [5, 100]
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[: room.pop(0)]))
    append_line(tmp_path / "log", b"in two writes")

    def full(fd: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data[: room.pop()])

    room.append(5)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RunError, match=r"log: appending failed: No space left on device; free some space"):
        append_line(tmp_path / "log", b"torn by a full disk")
    monkeypatch.setattr(os, "write", real)
    append_line(tmp_path / "log", b"whole")
    assert (tmp_path / "log").read_bytes() == b"in two writes\ntorn \nwhole\n"


def test_a_claim_that_the_disk_refuses_leaves_no_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def over_quota(*_: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "link", over_quota)
    with pytest.raises(RunError, match="disk quota is used up"):
        write_new_json(tmp_path / "shard-00007.1", {})
    assert list(tmp_path.iterdir()) == []


def test_swap_in_shows_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    final, tmp = tmp_path / "part", tmp_path / "part.tmp"
    final.write_bytes(b"old")
    with final.open("rb") as reader:
        write_file(tmp, b"new")
        swap_in(tmp, final)
        assert (reader.read(), final.read_bytes()) == (b"old", b"new")
    assert not tmp.exists()


def test_remove_tree_takes_all_and_may_be_repeated(tmp_path: Path) -> None:
    (tmp_path / "tree" / "deep").mkdir(parents=True)
    (tmp_path / "tree" / "deep" / "file").write_text("x")
    for _ in range(2):
        remove_tree(tmp_path / "tree")
        assert list(tmp_path.iterdir()) == []


def test_what_stays_in_a_tree_while_a_program_has_it_open_is_waited_for_and_then_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS (and FUSE) give a file that is removed while it is open another name in its folder, again and again."""
    (tmp_path / "tree").mkdir()
    kept, tries = tmp_path / "tree" / ".nfs1", count(1)

    def unlink(*_: Any, **__: Any) -> None:
        if next(tries) > 3:
            kept.rename(tmp_path / "closed")

    kept.touch()
    monkeypatch.setattr(os, "unlink", unlink)
    remove_tree(tmp_path / "tree")
    assert not (tmp_path / "tree").exists() and next(tries) == 5
    (tmp_path / "tree").mkdir()
    kept.touch()
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
    monkeypatch.setattr(durable, "_REMOVING_S", 0.1)
    with pytest.raises(RunError, match=r"/tree: cannot be removed: a program has a file in it open; end it"):
        remove_tree(tmp_path / "tree")


def test_a_file_that_cannot_be_read_is_named_and_is_not_called_damaged(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=rf"Input/output error: '{tmp_path}/run.json'"):
        read_json(unreadable(tmp_path / "run.json"))


def test_the_first_error_is_told_though_the_half_file_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    said = r"x: writing failed: Read-only.*output.path"
    with pytest.raises(RunError, match=said), new_file(tmp_path / "tmp", tmp_path / "x") as file:
        file.write(b"x")
    with pytest.raises(RunError, match=said):
        write_file(tmp_path / "x", b"x")
