from __future__ import annotations

import csv
import gzip
import io
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import InputError
from tests.data.reading import read, read_all

GOOD = b'1,plain\n2,"quoted, with ""quotes"" and\r\na newline"\n3,5" pipe\n'
GOOD_ROWS = [
    {"id": "1", "text": "plain"},
    {"id": "2", "text": 'quoted, with "quotes" and\r\na newline'},
    {"id": "3", "text": '5" pipe'},
]

BAD = {
    "too few fields": (b"4\n", "1 fields where the header has 2"),
    "too many fields": (b"4,a,b\n", "3 fields where the header has 2"),
    "text after a quote": (b'4,"a"b\n', "not valid CSV"),
    "bare carriage return": (b"4,a\rb\n", "not valid CSV"),
    "NUL": (b"4,a\0b\n", "NUL"),
    "invalid UTF-8": (b"4,a\xffb\n", "invalid UTF-8"),
    "too long": (b"4," + b"x" * 70_000 + b"\n", "longer than input.max_row_bytes 60000"),
    "too long over lines": (b'4,"' + b"x\n" * 35_000, "longer than input.max_row_bytes 60000"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_record_is_one_error_row_that_names_its_first_line(tmp_path: Path, case: str) -> None:
    record, message = BAD[case]
    path = tmp_path / "x.csv"
    path.write_bytes(b"id,text\n" + GOOD + record + (b"" if "over lines" in case else GOOD))
    rows, errors = read(path, max_row_bytes=60_000)
    assert rows[:3] == GOOD_ROWS
    assert errors[3].code == "bad_input"
    assert errors[3].message.startswith(f"{path}:6: ")
    assert message in errors[3].message
    if "over lines" not in case:
        assert rows[4:] == GOOD_ROWS and list(errors) == [3]


def test_a_record_over_lines_may_be_as_long_as_the_limit(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'id,text\n1,"4\n678"\n1,"4\n6789"\n')
    rows, errors = read(tmp_path / "x.csv", max_row_bytes=9)
    assert rows[0]["text"] == "4\n678" and list(errors) == [1]


def test_a_quote_that_is_never_closed_names_the_lines_it_swallowed(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b'id,text\n1,a\n2,"open\n3,b\n4,c\n')
    rows, errors = read(tmp_path / "x.csv")
    assert rows == [{"id": "1", "text": "a"}, {"id": None, "text": None}]
    assert "x.csv:3: lines 3 to 5: a quote that is never closed" in errors[1].message


@pytest.mark.parametrize(
    "data", [b"\xef\xbb\xbfid,text\n1,a\n", b"id,text\r\n1,a\r\n", b"id,text\n1,a", b'"id",text\n1,a']
)
def test_mark_carriage_returns_quotes_and_a_missing_newline_are_fine(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.csv").write_bytes(data)
    assert read(tmp_path / "x.csv") == ([{"id": "1", "text": "a"}], {})


def test_every_column_is_text_and_an_empty_field_is_empty_text(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b\n1,\n")
    with open_input(str(tmp_path / "x.csv")) as dataset:
        assert dataset.schema == pa.schema([("a", pa.string()), ("b", pa.string())])
        assert read_all(dataset)[0] == [{"a": "1", "b": ""}]


def test_files_with_other_columns_are_matched_by_name(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_bytes(b"a,b\n1,2\n")
    (tmp_path / "2.csv").write_bytes(b"c,a\n3,4\n")
    assert read(tmp_path)[0] == [{"a": "1", "b": "2", "c": None}, {"a": "4", "b": None, "c": "3"}]


def test_a_field_longer_than_the_csv_modules_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"a\n" + b"x" * 200_000 + b"\n")
    assert len(read(tmp_path / "x.csv")[0][0]["a"]) == 200_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a,a\n", "two columns are named 'a'"),
        (b",a\n", "column 1 has no name"),
        (b"a, \n", "column 2 has no name"),
        (b'"a\n', "never closed"),
        (b"a,\xff\n", "invalid UTF-8"),
        ("\ufeffa,b\r\n1,2\r\n".encode("utf-16-le"), "UTF-16"),  # its \r\0\n has an \r alone
        ("\ufeffa,b\n1,2\n".encode("utf-16-be"), "UTF-16"),
    ],
)
def test_a_header_that_names_no_columns_is_an_error_with_the_file(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.csv").write_bytes(data)
    with pytest.raises(InputError, match=r"x\.csv") as caught:
        read(tmp_path / "x.csv")
    assert message in str(caught.value)


fields = st.text(st.sampled_from('ab,"\n\r é😀'), max_size=6)


@given(table=st.lists(st.tuples(fields, fields), max_size=30), packed=st.booleans())
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_table_written_by_the_csv_module_comes_back_from_every_position(
    tmp_path: Path, table: list[tuple[str, str]], packed: bool
) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([("a", "b"), *table])
    data = text.getvalue().encode()
    path = tmp_path / ("x.csv.gz" if packed else "x.csv")
    path.write_bytes(gzip.compress(data) if packed else data)
    want = [{"a": a, "b": b} for a, b in table]
    with open_input(str(path)) as dataset:
        for start in range(len(want) + 1):
            assert read_all(dataset, Position(0, start)) == (want[start:], {})


@given(data=st.binary(max_size=60).map(lambda data: data.replace(b'"', b"'")), cap=st.integers(10, 70))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_without_quotes_every_fuzzed_line_that_is_not_blank_is_exactly_one_row(
    tmp_path: Path, data: bytes, cap: int
) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b\n" + data)
    filled = [line for line in data.split(b"\n") if line.strip() or len(line) > cap]
    assert len(read(tmp_path / "x.csv", max_row_bytes=cap)[0]) == len(filled)


@given(data=st.text(st.sampled_from('a,"\n\r'), max_size=40))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_quotes_in_any_place_never_raise(tmp_path: Path, data: str) -> None:
    (tmp_path / "x.csv").write_bytes(b"a,b\n" + data.encode())
    rows, errors = read(tmp_path / "x.csv")
    assert set(errors) <= set(range(len(rows)))


@pytest.mark.parametrize("row", range(4))
def test_blank_lines_between_records_are_no_rows_wherever_one_starts_to_read(tmp_path: Path, row: int) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b'\n\r\nid,text\n\n1,"a\n\n b"\n  \n\n2\n3,c\n\n')
    with open_input(str(path)) as dataset:
        rows, errors = read_all(dataset, Position(0, row))
    assert [each["text"] for each in rows] == ["a\n\n b", None, "c"][row:]
    assert [error.message.split(": ")[0] for error in errors.values()] == ([f"{path}:10"] if row < 2 else [])


@pytest.mark.parametrize("name", ["x.tsv", "x.TSV.gz", "x.csv"])
def test_tabs_separate_the_fields_of_tsv_and_of_what_the_job_says(tmp_path: Path, name: str) -> None:
    data = b'id\ttext\n1\ta, b\n\t\n\n2\t"a\tb"\n3\tx\ty\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    rows, errors = read(tmp_path / name, **({"delimiter": "\t"} if name == "x.csv" else {}))
    assert [(row["id"], row["text"]) for row in rows] == [("1", "a, b"), ("", ""), ("2", "a\tb"), (None, None)]
    assert list(errors) == [3] and "3 fields where the header has 2" in errors[3].message


def test_another_delimiter_is_used_or_suggested_where_the_header_has_it(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id;text\n1;a,b\n")
    assert read(tmp_path / "x.csv", delimiter=";") == ([{"id": "1", "text": "a,b"}], {})
    with open_input(str(tmp_path / "x.csv"), delimiter=";") as dataset:
        assert read_all(dataset.select(["text"])) == ([{"text": "a,b"}], {})
    assert read(tmp_path / "x.csv", delimiter=";", sql="SELECT text FROM input")[0] == [{"text": "a,b"}]
    with pytest.raises(InputError, match=r"x\.csv:1: .* 'id;text'; if ';' .* set input\.delimiter: \";\""):
        read(tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("id;text\n1;a\n")
    assert read(tmp_path / "x.csv", delimiter=",")[0] == [{"id;text": "1;a"}], "which is what it says"


def test_a_delimiter_for_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(InputError, match=r"input\.delimiter: .*x\.jsonl is jsonl, not CSV"):
        read(tmp_path / "x.jsonl", delimiter=";")


def test_lines_that_end_in_carriage_returns_alone_are_named_so(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_bytes(b"id,text\r1,a\r2,b\r")
    with pytest.raises(InputError, match=r"x.csv:1: not valid CSV: its lines end in \\r alone; write \\n"):
        read(tmp_path / "x.csv")
