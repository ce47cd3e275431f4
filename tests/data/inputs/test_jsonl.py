from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import InputError
from tests.data.reading import read, read_all, write_lines

GOOD = [{"id": number, "prompt": f"row {number}"} for number in range(23)]

BAD = {
    "truncated": (b'{"id": 1, "prompt": "cut o', "not valid JSON"),
    "two values": (b'{"id": 1} {"id": 2}', "not valid JSON: Extra data at column 11"),
    "invalid utf-8": (b'{"prompt": "\xff"}', "invalid UTF-8 at byte 13"),
    "lone surrogate": (rb'{"prompt": "\ud83d"}', "column prompt"),
    "lone surrogate in a key": (rb'{"prompt": "x", "\ud83d": 1}', "a key that is not Unicode"),
    "lone surrogate in a key inside": (rb'{"id": 1, "m": [{"\uDC00": 1}]}', "a key that is not Unicode"),
    "escaped NUL": (rb'{"prompt": "a\u0000b"}', "NUL"),
    "escaped NUL in a key": (rb'{"prompt\u0000": "b"}', "NUL"),
    "escaped NUL in a list": (rb'{"prompt": ["x", "a\u0000b"]}', "NUL"),
    "raw NUL": (b'{"prompt": "a\0b"}', "not valid JSON"),
    "space that is not JSON's": ("\u00a0".encode(), "not valid JSON"),
    "array": (b"[1, 2]", "a list, not a JSON object"),
    "scalar": (b'"text"', "a string, not a JSON object"),
    "null": (b"null", "null, not a JSON object"),
    "wrong type of id": (b'{"id": "seven", "prompt": "x"}', 'column id: string "seven"'),
    "object for text": (b'{"prompt": {"a": 1}}', "column prompt: an object of 1"),
    "NaN": (b'{"id": NaN}', "NaN is not a JSON value"),
    "infinity": (b'{"id": -Infinity}', "-Infinity is not a JSON value"),
    "beyond doubles": (b'{"id": 1e999}', "1e999 is beyond what a double holds"),
    "beyond int64": (b'{"id": 9223372036854775808}', "column id: integer beyond 64 bits"),
    "five thousand digits": (b'{"id": ' + b"9" * 5000 + b"}", "too many digits"),
    "boolean for an integer": (b'{"id": true}', "column id: bool true"),
    "nesting bomb": (b'{"prompt": ' + b"[" * 100_000, "nested more than 100 deep"),
    "closed nesting bomb": (b'{"prompt": ' + b"[" * 101 + b"]" * 101 + b"}", "nested more than 100 deep"),
    "duplicate key": (b'{"id": 1, "id": 2}', "key 'id' appears twice"),
    "too long": (b'{"prompt": "' + b"x" * 200_000 + b'"}', "longer than input.max_row_bytes 150000"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_line_is_one_error_row_that_names_the_line(tmp_path: Path, case: str) -> None:
    line, message = BAD[case]
    path = write_lines(tmp_path / "x.jsonl", [*GOOD, line, *GOOD])
    rows, errors = read(path, max_row_bytes=150_000)
    assert len(rows) == 2 * len(GOOD) + 1
    assert list(errors) == [len(GOOD)]
    assert errors[len(GOOD)].code == "bad_input"
    assert errors[len(GOOD)].message.startswith(f"{path}:{len(GOOD) + 1}: ")
    assert message in errors[len(GOOD)].message
    assert rows[: len(GOOD)] == rows[len(GOOD) + 1 :] == GOOD


FINE = {
    "no final newline": b'{"id": 1}\n{"id": 2}',
    "CRLF": b'{"id": 1}\r\n{"id": 2}\r\n',
    "byte order mark": b'\xef\xbb\xbf{"id": 1}\n{"id": 2}\n',
    "brackets in text": b'{"id": 1}\n{"x": "' + b"[{" * 200 + b'", "id": 2}\n',
    "an escaped backslash before u0000": b'{"id": 1}\n{"x": "\\\\u0000", "id": 2}\n',
    "surrogate pair in a key": b'{"id": 1}\n{"\\ud83d\\ude00": 1, "id": 2}\n',
    "surrogate pair": b'{"id": 1}\n{"x": "\\ud83d\\ude00", "id": 2}\n',
    "whole number as a float": b'{"id": 1}\n{"id": 2}\n{"id": 3}\n'.replace(b"3", b"3e0"),
}


@pytest.mark.parametrize("case", FINE)
def test_what_is_only_unusual_is_fine(tmp_path: Path, case: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(FINE[case])
    rows, errors = read(tmp_path / "x.jsonl")
    assert errors == {}
    assert [row["id"] for row in rows][:2] == [1, 2]


def test_null_and_missing_values_are_null_and_not_errors(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": None}, {"id": 3}])
    assert read(path) == ([{"id": 1, "prompt": "a"}, {"id": 2, "prompt": None}, {"id": 3, "prompt": None}], {})


@pytest.mark.parametrize(("data", "rows"), [(b"", 0), (b"\n \r\n", 0), (b"\xef\xbb\xbf", 0), (b"x", 1)])
def test_a_file_without_any_good_line_still_has_its_rows(tmp_path: Path, data: bytes, rows: int) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    got, errors = read(tmp_path / "x.jsonl")
    assert len(got) == len(errors) == rows


def test_several_bad_rows_of_different_kinds_in_one_batch_are_all_found(tmp_path: Path) -> None:
    lines = [line for row, (bad, _) in zip(GOOD * 9, BAD.values(), strict=False) for line in (row, row, bad)]
    rows, errors = read(write_lines(tmp_path / "x.jsonl", [*GOOD * 9, *lines]), max_row_bytes=150_000)
    assert sorted(errors) == list(errors) == [9 * len(GOOD) + 2 + 3 * number for number in range(len(BAD))]
    assert len(rows) == 9 * len(GOOD) + len(lines)


def test_values_arrow_would_bend_are_errors(tmp_path: Path) -> None:
    """pa.array turns True into 1.0, a string given for a list into its letters, and [] into an empty struct."""
    good = {"score": 0.5, "tags": ["a"], "meta": {"k": 1}}
    bad: list[dict[str, Any]] = [{"score": True}, {"tags": "abc"}, {"meta": []}, {"score": 2**53 + 1}]
    rows, errors = read(write_lines(tmp_path / "x.jsonl", [good] * 47 + bad))
    assert list(errors) == [47, 48, 49, 50]
    assert rows[:47] == [good] * 47
    assert list(read(write_lines(tmp_path / "x.jsonl", [good] * 47 + bad[:1]))[1]) == [47], "without others' help"


def test_a_row_of_thousands_of_keys_is_refused_by_name(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{f"user{number}": 1 for number in range(4097)}])
    with pytest.raises(InputError, match=r"x\.jsonl: more than 4096 different keys in the first lines"):
        open_input(str(path))


def test_a_fraction_in_a_column_of_integers_is_an_error_only_when_the_sample_had_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"id": number} for number in range(50)] + [{"id": 1.5}, {"id": 2.0}])
    assert read(path)[1] == {}
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 50)
    rows, errors = read(path)
    assert "column id: number 1.5 where the other rows have a 64-bit integer" in errors[50].message
    assert rows[51] == {"id": 2} and len(errors) == 1


def test_one_float_among_ids_that_no_double_holds_leaves_the_ids_as_they_are(tmp_path: Path) -> None:
    ids = [1234567890123456789 + 2 * number for number in range(100)]
    rows, errors = read(write_lines(tmp_path / "x.jsonl", [{"id": number} for number in ids] + [{"id": 1.0}]))
    assert [row["id"] for row in rows] == [*ids, 1] and errors == {}
    rows, errors = read(write_lines(tmp_path / "x.jsonl", [{"id": number} for number in ids] + [{"id": 1.5}]))
    assert [row["id"] for row in rows] == [*ids, None]
    assert "column id: number 1.5 where the other rows have a 64-bit integer" in errors[100].message
    _, errors = read(write_lines(tmp_path / "x.jsonl", [{"id": number} for number in ids] + [{"id": 1e19}]))
    assert "column id: number 1e+19 where the other rows have a 64-bit integer" in errors[100].message


def test_an_integer_that_no_double_holds_among_many_fractions_is_an_error_that_says_so(tmp_path: Path) -> None:
    rows, errors = read(write_lines(tmp_path / "x.jsonl", [{"v": 0.5}] * 47 + [{"v": 2**53}, {"v": -(2**53) - 1}]))
    assert rows[47] == {"v": 2.0**53} and list(errors) == [48]
    assert "column v: integer -9007199254740993 beyond 2^53, where doubles are not exact" in errors[48].message


def test_mixed_types_become_text_and_strings_stay_as_they_are(tmp_path: Path) -> None:
    rows, errors = read(
        write_lines(
            tmp_path / "x.jsonl", [{"v": "a"}, {"v": 5}, {"v": [1, {"k": "é"}]}, {"v": None}, {"v": ["\ud800é"]}]
        )
    )
    assert [row["v"] for row in rows] == ["a", "5", '[1, {"k": "é"}]', None, '["\\ud800\\u00e9"]']
    assert errors == {}


def test_few_numbers_among_strings_are_text_as_many_are_and_few_objects_are_not(tmp_path: Path) -> None:
    odd: list[Any] = [5, True, 1.5, 2**70]
    few = write_lines(tmp_path / "few.jsonl", [{"v": "a"}] * 96 + [{"v": value} for value in odd] + [{"v": {"k": 1}}])
    many = write_lines(tmp_path / "many.jsonl", [{"v": value} for value in odd])
    rows, errors = read(few)
    assert rows[96:100] == read(many)[0] == [{"v": text} for text in ("5", "true", "1.5", str(2**70))]
    assert (
        list(errors) == [100] and "column v: an object of 1 where the other rows have a string" in errors[100].message
    )


def test_an_error_row_keeps_the_columns_that_fit(tmp_path: Path) -> None:
    good = {"id": "a", "n": 1, "tags": ["x"], "text": "t"}
    bad = [{**good, "n": "one"}, {**good, "text": "\ud800", "tags": "x"}, {**good, "id": "\udfff", "n": True}]
    rows, errors = read(write_lines(tmp_path / "x.jsonl", [good] * 40 + bad))
    assert rows[40:] == [{**good, "n": None}, {**good, "text": None, "tags": None}, {**good, "id": None, "n": None}]
    assert [error.message.partition(": ")[2].partition(":")[0] for error in errors.values()] == [
        "column n",
        "column tags",
        "column id",
    ]


def test_a_column_that_is_null_all_through_the_sample_keeps_its_later_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that infers `null` fails at the first value (the null-typed column bug of many pipelines)."""
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 100)
    path = write_lines(tmp_path / "x.jsonl", [{"v": None}] * 3000 + [{"v": "text"}, {"v": 7}, {"v": {"a": 1}}])
    rows, errors = read(path)
    assert [row["v"] for row in rows[-3:]] == ["text", "7", '{"a": 1}']
    assert errors == {}


def test_columns_that_appear_after_the_sample_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 100)
    late = [{"m": [], "late": 1}, {"m": [{"a": 1, "b": 2}]}]
    path = write_lines(tmp_path / "x.jsonl", [{"m": [{"a": 1}]}] * 1500 + late + [{"m": [{"a": "one"}]}, *late])
    with open_input(str(path)) as dataset:
        rows, errors = read_all(dataset)
        assert dataset.undeclared_columns == {"late": 2, "m.b": 2}, "also around a row that does not fit"
    assert list(errors) == [1502] and len(rows) == 1505


def test_messages_become_a_list_of_structs(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "hi"}]}
    with open_input(str(write_lines(tmp_path / "x.jsonl", [row, row]))) as dataset:
        assert dataset.schema.field("messages").type == pa.list_(
            pa.struct([("role", pa.string()), ("content", pa.string())])
        )
        assert read_all(dataset) == ([row, row], {})


def test_a_column_that_was_not_chosen_cannot_make_an_error(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [*GOOD, {"id": "seven", "prompt": "x"}])
    with open_input(str(path)) as dataset:
        chosen = dataset.select(["prompt"])
        rows, errors = read_all(chosen)
        assert chosen.undeclared_columns == {}, "the sample has shown what was not chosen"
    assert errors == {} and rows[-1] == {"prompt": "x"}


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_lines_read_like_plain_ones(tmp_path: Path, suffix: str) -> None:
    plain = write_lines(tmp_path / "x.jsonl", GOOD * 99)
    packed = tmp_path / f"y.jsonl{suffix}"
    if suffix == ".gz":
        packed.write_bytes(gzip.compress(plain.read_bytes()))
    else:
        with pa.CompressedOutputStream(str(packed), "zstd") as stream:
            stream.write(plain.read_bytes())
    assert read(packed) == read(plain) == (GOOD * 99, {})


def test_a_torn_zstd_file_names_itself(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.zst"
    with pa.CompressedOutputStream(str(path), "zstd") as stream:
        stream.write(b'{"a": 1}\n' * 9999)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match=r"x\.jsonl\.zst"):
        read(path)


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.text(max_size=5)
    | st.floats(allow_nan=False, width=32),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
fuzzed_line = st.one_of(
    st.binary(max_size=30).map(lambda data: data.replace(b"\n", b" ")),
    st.dictionaries(st.sampled_from("abc"), values, max_size=3).map(lambda row: json.dumps(row).encode()),
    st.sampled_from([bad for bad, _ in BAD.values() if len(bad) < 1000]),
)


@given(lines=st.lists(fuzzed_line, max_size=30), final_newline=st.booleans(), cap=st.integers(1, 400))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_fuzzed_lines_that_are_not_blank_are_each_exactly_one_row(
    tmp_path: Path, lines: list[bytes], final_newline: bool, cap: int
) -> None:
    data = b"\n".join(lines) + (b"\n" if final_newline else b"")
    (tmp_path / "x.jsonl").write_bytes(data)
    pieces = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    expected = sum(bool(line.strip()) or len(line) > cap for line in pieces)
    with open_input(str(tmp_path / "x.jsonl"), max_row_bytes=cap) as dataset:
        rows, _ = read_all(dataset)
        assert len(rows) == expected
        for start in {0, expected // 2, max(0, expected - 1), expected}:
            assert read_all(dataset, Position(0, start))[0] == rows[start:]


@given(
    table=st.lists(
        st.fixed_dictionaries(
            {"a": st.integers(-(2**63), 2**63 - 1), "b": st.text(max_size=9).filter(lambda t: "\0" not in t)}
        ),
        max_size=40,
    )
)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_table_written_by_json_comes_back_equal(tmp_path: Path, table: list[dict[str, Any]]) -> None:
    assert read(write_lines(tmp_path / "x.jsonl", table)) == (table, {})


# VmHWM, not ru_maxrss: a child starts with its parent's ru_maxrss, and the whole suite's is large.
MEASURE = """
import re, sys
from pathlib import Path
from bulkrun.data.inputs.reader import open_input
def peak_kib():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
with open_input(sys.argv[1]) as dataset:
    base = peak_kib()
    rows = errors = 0
    for batch in dataset.batches():
        rows += batch.rows.num_rows
        errors += len(batch.errors)
print(rows, errors, (peak_kib() - base) // 1024, base // 1024)
"""


def test_a_hundred_megabyte_line_is_one_error_row_and_is_never_held(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    with path.open("wb") as stream:
        stream.write(b'{"a": 1}\n{"a": "')
        for _ in range(100):
            stream.write(b"x" * 2**20)
        stream.write(b'"}\n{"a": 2}\n')
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    rows, errors, grown_mib, base_mib = map(int, done.stdout.split())
    assert (rows, errors) == (3, 1)
    assert grown_mib < 50 and base_mib < 250


@pytest.mark.parametrize("row", range(5))
def test_blank_lines_are_no_rows_wherever_one_starts_to_read(tmp_path: Path, row: int) -> None:
    lines = [b"", {"id": 0}, b"  \t\r", b"", {"id": 1}, b"x", {"id": 3}, b" "]
    path = write_lines(tmp_path / "x.jsonl", lines)
    with open_input([str(path)] * 2) as dataset:
        rows, errors = read_all(dataset, Position(0, row))
    assert [each["id"] for each in rows] == [0, 1, None, 3][row:]
    assert [error.message.split(": ")[0] for error in errors.values()] == ([f"{path}:6"] if row < 3 else [])
