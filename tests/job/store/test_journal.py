"""The journal: what reads back is what was written, whatever a crash, a bad disk or a stranger did to the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.errors import RunError
from bulkrun.job.store.journal import (
    JournalRecord,
    JournalWriter,
    PartialRecord,
    encode_record,
    read_journal,
    read_outcomes,
)

RECORDS = st.builds(
    JournalRecord,
    rows=st.lists(st.integers(0, 2**40), min_size=1, max_size=4).map(tuple),
    sample=st.integers(0, 5),
    response=st.one_of(st.none(), st.text(max_size=30)),
    finish_reason=st.sampled_from(["stop", "length", "error"]),
    prompt_tokens=st.integers(0, 10**6),
    completion_tokens=st.integers(0, 10**6),
    error_code=st.one_of(st.none(), st.just("bad_input")),
    error_message=st.one_of(st.none(), st.text(max_size=20)),
)
PARTIALS = st.builds(
    PartialRecord,
    rows=st.lists(st.integers(0, 99), min_size=1, max_size=3).map(tuple),
    sample=st.integers(0, 2),
    token_ids=st.lists(st.integers(0, 10**5), max_size=9).map(tuple),
)


def record(row: int, response: str = "text", sample: int = 0) -> JournalRecord:
    return JournalRecord((row,), sample, response, "stop", 3, 4)


@given(records=st.lists(st.one_of(RECORDS, PARTIALS), max_size=8))
@settings(max_examples=100)
def test_records_read_back_as_they_were_written(tmp_path_factory: pytest.TempPathFactory, records: list) -> None:
    path = tmp_path_factory.mktemp("journal") / "shard-00000.a.jsonl"
    writer = JournalWriter(path)
    for one in records:
        writer.append([one])
    writer.sync()
    writer.release()
    contents = read_journal(path)
    assert contents.records == [one for one in records if isinstance(one, JournalRecord)]
    assert contents.partials == [one for one in records if isinstance(one, PartialRecord)]
    assert contents.damaged == []


def test_cut_at_every_byte_it_keeps_exactly_the_whole_records(tmp_path: Path) -> None:
    records = [record(0, "a\nb"), record(1, "ü\u2028 \x00 🎈"), record(22, "")]
    lines = [encode_record(one) for one in records]
    data, ends = b"".join(lines), [sum(map(len, lines[: n + 1])) for n in range(3)]
    path = tmp_path / "j"
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        contents = read_journal(path)
        # A record is whole once its last byte before the newline is there.
        assert contents.records == [one for one, end in zip(records, ends, strict=True) if cut >= end - 1]
        assert contents.damaged == []


@given(st.lists(RECORDS, min_size=1, max_size=5), st.data())
@settings(max_examples=150)
def test_a_changed_byte_costs_the_rows_it_hits_and_never_gives_a_wrong_one(
    tmp_path_factory: pytest.TempPathFactory, records: list[JournalRecord], data: st.DataObject
) -> None:
    good = b"".join(map(encode_record, records))
    at, flip = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("journal") / "j"
    path.write_bytes(good[:at] + bytes([good[at] ^ flip]) + good[at + 1 :])
    contents = read_journal(path)
    assert all(one in records for one in contents.records)
    assert len(contents.records) >= len(records) - 2, "a lost newline joins two lines, no more"


@given(st.binary(max_size=200))
@settings(max_examples=100)
def test_any_bytes_are_refused_without_a_traceback(tmp_path_factory: pytest.TempPathFactory, junk: bytes) -> None:
    path = tmp_path_factory.mktemp("journal") / "j"
    path.write_bytes(junk)
    assert read_journal(path).records == []


def test_damage_in_the_middle_is_reported_with_its_line(tmp_path: Path) -> None:
    lines = [encode_record(record(row)) for row in range(3)]
    (tmp_path / "j").write_bytes(lines[0] + lines[1].replace(b"text", b"tExt") + lines[2] + b"torn")
    contents = read_journal(tmp_path / "j")
    assert [one.rows for one in contents.records] == [(0,), (2,)] and contents.damaged == [2]


def test_appending_after_a_failed_write_does_not_lose_the_next_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, real = JournalWriter(tmp_path / "j"), os.write

    def half(fd: int, data: bytes) -> int:
        real(fd, bytes(data)[:10])
        raise OSError(28, "full")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(RunError, match=r"No space left.*free some space"):
        writer.append([record(0)])
    monkeypatch.setattr(os, "write", real)
    writer.append([record(1)])
    writer.release()
    assert [one.rows for one in read_journal(tmp_path / "j").records] == [(1,)]


def test_of_several_attempts_the_first_good_record_wins_and_the_longest_partial(tmp_path: Path) -> None:
    for name, response, tokens in (("a", "first", (1,)), ("b", "second", (1, 2)), ("c", "third", (1,))):
        writer = JournalWriter(tmp_path / name)
        writer.append([record(7, response), PartialRecord((8, 9), 1, tokens)])
        writer.release()
    outcomes = read_outcomes([tmp_path / name for name in ("a", "b", "c", "missing")])
    assert outcomes.answered[7, 0].response == "first"
    assert outcomes.partials == {(8, 1): (1, 2), (9, 1): (1, 2)}


def test_what_is_damaged_is_told_by_journal_and_line(tmp_path: Path) -> None:
    lines = [encode_record(record(row, "t")) for row in range(3)]
    (tmp_path / "a").write_bytes(lines[0] + b"x" + lines[1] + lines[2])
    (tmp_path / "b").write_bytes(lines[1])
    outcomes = read_outcomes([tmp_path / "a", tmp_path / "b"])
    assert outcomes.damaged == {"a": [2]} and sorted(outcomes.answered) == [(0, 0), (1, 0), (2, 0)]


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    JournalWriter(tmp_path / "j").append([record(0)])
    with pytest.raises(RunError, match="File exists"):
        JournalWriter(tmp_path / "j")
    assert [one.rows for one in read_journal(tmp_path / "j").records] == [(0,)]


def test_the_name_of_a_journal_survives_a_power_cut_with_the_first_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, real = list[int](), os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    writer, file, folder = JournalWriter(tmp_path / "j"), (tmp_path / "j").stat().st_ino, tmp_path.stat().st_ino
    writer.sync()
    assert synced == [], "nothing is in it"
    for row in range(2):
        writer.append([record(row)])
        writer.sync()
    assert synced == [file, folder, file]


def test_rows_of_one_generation_become_done_together(tmp_path: Path) -> None:
    whole = encode_record(JournalRecord((1, 2, 3), 0, "x", "stop", 1, 1))
    for cut in range(len(whole)):
        (tmp_path / "j").write_bytes(whole[:cut])
        assert len(read_outcomes([tmp_path / "j"]).answered) in (0, 3)
