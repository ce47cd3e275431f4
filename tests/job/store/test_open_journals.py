"""More journals than descriptors: nothing that was appended is lost, and every checkpoint reaches all of it."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from bulkrun.errors import RunError
from bulkrun.job.store.journal import JournalRecord, JournalWriter, read_journal
from bulkrun.job.store.open_journals import OpenJournals


def record(row: int) -> JournalRecord:
    return JournalRecord((row,), 0, "text", "stop")


def ours() -> None:
    """The run was not replaced."""


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def ten(folder: Path, most: int) -> OpenJournals:
    journals = OpenJournals(ours, most)
    for shard in range(10):
        journals.add(shard, JournalWriter(folder / str(shard)))
    return journals


def rows_in(path: Path) -> list[int]:
    return [row for one in read_journal(path).records for row in one.rows]


def test_records_of_many_shards_in_turns_need_few_descriptors(tmp_path: Path) -> None:
    before, journals = descriptors(), ten(tmp_path, most=3)
    for row in range(50):
        journals.append(row * 7 % 10, [record(row)])
        assert descriptors() <= before + 3
    journals.sync()
    assert descriptors() <= before + 3
    journals.close()
    assert descriptors() == before
    for shard in range(10):
        assert rows_in(tmp_path / str(shard)) == [row for row in range(50) if row * 7 % 10 == shard]


def test_a_checkpoint_syncs_what_was_appended_through_closed_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = Counter[int](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.update([os.fstat(fd).st_ino]), real(fd))[1])
    journals = ten(tmp_path, most=2)
    files = [(tmp_path / str(shard)).stat().st_ino for shard in range(10)]
    for shard in range(9):
        journals.append(shard, [record(shard)])
    journals.sync()
    assert [synced[file] for file in files] == [1] * 9 + [0], "nothing is in the last"
    journals.append(4, [record(4)])
    journals.sync()
    assert [synced[file] for file in files] == [1, 1, 1, 1, 2, 1, 1, 1, 1, 0]


def test_a_torn_line_is_remembered_while_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journals, real = ten(tmp_path, most=1), os.write

    def half(fd: int, data: bytes) -> int:
        real(fd, bytes(data)[:10])
        raise OSError(28, "full")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(RunError, match="No space left"):
        journals.append(0, [record(0)])
    monkeypatch.setattr(os, "write", real)
    journals.append(1, [record(1)])
    journals.append(0, [record(2)])
    assert rows_in(tmp_path / "0") == [2]


@pytest.mark.parametrize("sync", [False, True])
def test_a_journal_that_another_worker_removed_with_its_shard_is_forgotten(tmp_path: Path, sync: bool) -> None:
    journals = ten(tmp_path, most=1)
    for shard in (0, 1):
        journals.append(shard, [record(shard)])
    (tmp_path / "0").unlink()
    journals.sync() if sync else journals.append(0, [record(0)])
    journals.sync()
    assert not (tmp_path / "0").exists() and rows_in(tmp_path / "1") == [1]


def test_a_journal_that_went_with_its_run_ends_the_worker(tmp_path: Path) -> None:
    def replaced() -> None:
        raise RunError("moved aside")

    journals = OpenJournals(replaced, 1)
    for shard in (0, 1):
        journals.add(shard, JournalWriter(tmp_path / str(shard)))
        journals.append(shard, [record(shard)])
    (tmp_path / "0").unlink()
    with pytest.raises(RunError, match="moved aside"):
        journals.append(0, [record(0)])
    assert not (tmp_path / "0").exists()
