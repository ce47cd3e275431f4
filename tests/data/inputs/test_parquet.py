from __future__ import annotations

import errno
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bulkrun.data.inputs.batch import MAX_BATCH_BYTES, Position
from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import BulkrunError, InputError
from tests.data.reading import read, read_all


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


BROKEN: dict[str, Callable[[bytes], bytes]] = {
    "cut in the middle": lambda data: data[: len(data) // 2],
    "last byte missing": lambda data: data[:-1],
    "four bytes": lambda data: data[:4],
    "empty": lambda data: b"",
    "text": lambda data: b'{"a": 1}\n' * 100,
    "zeros in the footer": lambda data: data[:-60] + bytes(52) + data[-8:],
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_torn_file_is_an_error_that_names_it_before_any_row_is_read(tmp_path: Path, case: str) -> None:
    write(tmp_path / "good.parquet", {"a": list(range(999))})
    torn = write(tmp_path / "torn.parquet", {"a": list(range(999))})
    torn.write_bytes(BROKEN[case](torn.read_bytes()))
    with pytest.raises(InputError, match=r"torn\.parquet: not a whole Parquet file"):
        open_input(str(tmp_path))


def test_a_flipped_bit_in_a_page_with_a_checksum_names_file_and_row_group(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.parquet",
        {"a": pa.array(range(3000), pa.int64())},
        row_group_size=1000,
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
    )
    data = bytearray(path.read_bytes())
    data[pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset + 500] ^= 4
    path.write_bytes(data)
    with open_input(str(path)) as dataset:
        batches = dataset.batches()
        assert next(batches).rows.num_rows == 1000
        with pytest.raises(InputError, match=r"x\.parquet: row group 1 .*CRC"):
            next(batches)
        assert read_all(dataset, Position(0, 2000))[0][0] == {"a": 2000}


@pytest.mark.parametrize("start", [0, 1, 699, 700, 701, 1399, 2099, 2100])
def test_reading_starts_at_any_row_of_any_row_group(tmp_path: Path, start: int) -> None:
    path = write(tmp_path / "x.parquet", {"a": list(range(2100))}, row_group_size=700)
    with open_input(str(path)) as dataset:
        assert dataset.num_rows == 2100
        assert [row["a"] for row in read_all(dataset, Position(0, start))[0]] == list(range(start, 2100))


def test_a_column_that_a_file_lacks_is_null_and_types_widen(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"a": pa.array([1], pa.int32()), "n": pa.nulls(1)})
    write(tmp_path / "2.parquet", {"b": ["x"], "a": pa.array([2**40], pa.int64()), "n": [7]})
    with open_input(str(tmp_path)) as dataset:
        assert dataset.schema == pa.schema([("a", pa.int64()), ("n", pa.int64()), ("b", pa.string())])
        rows, errors = read_all(dataset)
    assert rows == [{"a": 1, "n": None, "b": None}, {"a": 2**40, "n": 7, "b": "x"}]
    assert errors == {}


def test_where_all_files_have_nulls_alone_the_type_is_the_known_one(tmp_path: Path) -> None:
    deep = pa.struct([("a", pa.date32()), ("b", pa.list_(pa.int64()))])
    rows = [{"n": None, "deep": {"a": None, "b": []}, "told": 1, "new": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    with open_input(str(tmp_path), known_types={"n": pa.bool_(), "deep": deep, "told": pa.string()}) as dataset:
        assert dataset.schema.types == [pa.bool_(), deep, pa.int64(), pa.string()]
        assert read_all(dataset) == (rows, {})


HOLLOW: dict[str, tuple[pa.DataType, Any, pa.DataType, Any]] = {
    "list": (pa.list_(pa.null()), [None], pa.list_(pa.int64()), [7]),
    "list of structs": (pa.list_(pa.null()), [], pa.list_(pa.struct([("a", pa.int64())])), [{"a": 7}]),
    "large list": (pa.large_list(pa.null()), [None], pa.list_(pa.float64()), [0.5]),
    "struct": (pa.struct([("a", pa.null())]), {"a": None}, pa.struct([("a", pa.bool_())]), {"a": True}),
    "map": (pa.map_(pa.string(), pa.null()), [("k", None)], pa.map_(pa.string(), pa.int64()), [("k", 7)]),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("case", HOLLOW)
def test_nulls_alone_inside_a_column_of_one_file_have_the_type_of_another(
    tmp_path: Path, case: str, first: bool
) -> None:
    hollow_type, hollow, type_, value = HOLLOW[case]
    columns = [pa.array([hollow, None], hollow_type), pa.array([value, None], type_)]
    for number, column in enumerate(columns if first else columns[::-1]):
        write(tmp_path / f"{number}.parquet", {"c": column})
    rows = [hollow, None, value, None] if first else [value, None, hollow, None]
    assert read(tmp_path) == ([{"c": row} for row in rows], {})


def test_a_type_conflict_names_both_files_the_column_and_the_types(tmp_path: Path) -> None:
    write(tmp_path / "0.parquet", {"ok": [0]})
    write(tmp_path / "1.parquet", {"ok": [1], "a": [1]})
    write(tmp_path / "2.parquet", {"ok": [2], "a": ["x"]})
    with pytest.raises(InputError, match=r"column 'a' is int64 in \S*1\.parquet but string in \S*2\.parquet"):
        open_input(str(tmp_path))


def test_whole_numbers_among_decimals_that_do_not_hold_them_all_are_refused_by_name(tmp_path: Path) -> None:
    for name, kind in (("a", pa.decimal128(20, 2)), ("b", pa.int64())):
        pq.write_table(pa.table({"price": pa.nulls(1, kind)}), tmp_path / f"{name}.parquet")
    with pytest.raises(InputError, match=r"b.parquet: column 'price' has the type int64"):
        open_input(str(tmp_path))


@pytest.mark.parametrize("inside", [lambda kind: kind, pa.list_, lambda kind: pa.struct([("s", kind)])])
def test_decimals_in_one_file_and_floats_in_another_are_refused_by_name(
    tmp_path: Path, inside: Callable[[pa.DataType], pa.DataType]
) -> None:
    for name, kind in (("a", pa.decimal128(38, 9)), ("b", pa.float64())):
        pq.write_table(pa.table({"price": pa.nulls(1, inside(kind))}), tmp_path / f"{name}.parquet")
    with pytest.raises(
        InputError, match=r"a.parquet: column 'price' has the type .*decimal128\(38, 9\).*, which cannot"
    ):
        open_input(str(tmp_path))


def test_members_of_objects_are_compared_by_name_whatever_their_order(tmp_path: Path) -> None:
    number, price = ("n", pa.int64()), ("price", pa.decimal128(38, 9))
    for name, members in (("a", [number, ("price", pa.float64())]), ("b", [price, number])):
        write(tmp_path / f"{name}.parquet", {"c": pa.nulls(1, pa.struct(members))})
    with pytest.raises(InputError, match=r"b.parquet: column 'c' has the type .*decimal128\(38, 9\).*, which cannot"):
        open_input(str(tmp_path))


def test_encodings_are_read_as_plain_types(tmp_path: Path) -> None:
    columns = {
        "category": pa.array(["x", "y", None, "x"]).dictionary_encode(),
        "view": pa.array(["x", None, "z", ""], pa.string_view()),
        "nothing": pa.nulls(4),
        "inside": pa.array([{"k": "a"}, None, {"k": None}, {"k": "b"}]),
    }
    with open_input(str(write(tmp_path / "x.parquet", columns))) as dataset:
        assert dataset.schema.types[:3] == [pa.string()] * 3
        assert read_all(dataset)[0] == pa.table(columns).to_pylist()


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)])
def test_text_that_one_file_does_not_mark_as_text_is_text(tmp_path: Path, kind: pa.DataType) -> None:
    write(tmp_path / "1.parquet", {"t": ["ü", None]})
    write(tmp_path / "2.parquet", {"t": pa.array(["ö".encode(), b"\xff\xfe", b"ab"], kind)})
    write(tmp_path / "3.parquet", {"t": pa.array(["é"], pa.large_string())})
    rows, errors = read(tmp_path)
    assert [row["t"] for row in rows] == ["ü", None, "ö", None, "ab", "é"]
    assert list(errors) == [3] and "2.parquet: row 1: column 't' is " in errors[3].message


def test_uuids_are_text(tmp_path: Path) -> None:
    duckdb.execute(
        f"COPY (SELECT unnest(['{UUID(int=1)}', NULL, '{UUID(int=2**128 - 1)}'])::UUID AS u) TO '{tmp_path}/1.parquet'"
    )
    write(tmp_path / "2.parquet", {"u": pa.array([UUID(int=3).bytes], pa.uuid())})
    write(tmp_path / "3.parquet", {"u": ["other"]})
    texts = [str(UUID(int=1)), None, str(UUID(int=2**128 - 1)), str(UUID(int=3)), "other"]
    assert read(tmp_path) == ([{"u": text} for text in texts], {})
    assert read(tmp_path / "1.parquet") == ([{"u": text} for text in texts[:3]], {})


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.parquet._BOMB_BYTES", 2**20)
    zeros = pa.repeat(pa.scalar(0, pa.int64()), 1_000_000)
    path = write(tmp_path / "x.parquet", {"a": zeros}, use_dictionary=False, compression="zstd")
    with pytest.raises(InputError, match=r"x\.parquet: row group 0 would unpack to 0\.0 GiB from a file of \d+ bytes"):
        open_input(str(path))


def test_a_row_of_too_many_bytes_is_an_error_row(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {"id": [1, 2, 3], "a": ["x", "y" * 5000, "z"]})
    rows, errors = read(path, max_row_bytes=4000)
    assert rows == [{"id": 1, "a": "x"}, {"id": None, "a": None}, {"id": 3, "a": "z"}]
    assert list(errors) == [1] and "row 1 has 50" in errors[1].message
    size = int(errors[1].message.split("row 1 has ")[1].split()[0])
    assert read(path, max_row_bytes=size)[1] == {}, "as many as are allowed"
    assert list(read(path, max_row_bytes=size - 1)[1]) == [1]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Error reading bytes from file"), r"x\.parquet: row group 0 .*reading bytes from file$"),
        (pa.ArrowMemoryError("malloc of size 9 failed"), r"x\.parquet: reading failed: .*the file is as it was"),
        (pa.ArrowInvalid("no such page"), r"x\.parquet: row group 0 .*no such page; get a good copy$"),
    ],
)
def test_only_a_damaged_file_is_to_be_got_again(
    tmp_path: Path, error: Exception, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", fail)
    with open_input(str(write(tmp_path / "x.parquet", {"a": [1]}))) as dataset, pytest.raises(BulkrunError, match=said):
        read_all(dataset)


def test_a_shortage_of_memory_makes_no_file_a_torn_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise pa.ArrowMemoryError("malloc of size 9 failed")

    path = write(tmp_path / "x.parquet", {"a": [1]})
    monkeypatch.setattr(pq, "ParquetFile", fail)
    with pytest.raises(BulkrunError, match=r"x\.parquet: reading failed: .*the file is as it was"):
        open_input(str(path))


def not_utf8() -> pa.StringArray:
    """The texts a, null, one that is no UTF-8, and é."""
    offsets, texts = pa.array([0, 1, 1, 3, 5], pa.int32()), b"a\xff\xfe\xc3\xa9"
    return pa.StringArray.from_buffers(4, offsets.buffers()[1], pa.py_buffer(texts), pa.py_buffer(b"\x0d"))


@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize("kind", ["text", "large", "view", "struct", "list", "map"])
def test_invalid_utf8_is_an_error_of_its_row_alone(tmp_path: Path, kind: str, group: int) -> None:
    texts, starts = not_utf8(), [0, 1, 2, 3, 4]
    columns: dict[str, pa.Array] = {
        "text": texts,
        "large": texts.cast(pa.large_string()),
        "view": texts.cast(pa.string_view()),
        "struct": pa.StructArray.from_arrays([texts], ["inside"]),
        "list": pa.ListArray.from_arrays(starts, texts),
        "map": pa.MapArray.from_arrays(starts, pa.array(list("wxyz")), texts),
    }
    path = write(tmp_path / "x.parquet", {"id": [1, 2, 3, 4], "t": columns[kind]}, row_group_size=group)
    good = [columns[kind][row].as_py() for row in (0, 1, 3)]
    rows, errors = read(path)
    assert [row["id"] for row in rows] == [1, 2, None, 4]
    assert [rows[row]["t"] for row in (0, 1, 2, 3)] == [good[0], good[1], None, good[2]]
    assert {row: error.code for row, error in errors.items()} == {2: "bad_input"}
    assert errors[2].message == f"{path}: row 2 has invalid UTF-8 in column 't'"


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["a", "a"]), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="two columns are named 'a'"):
        open_input(str(tmp_path))


def test_two_fields_of_one_name_inside_a_column_are_refused(tmp_path: Path) -> None:
    twins = pa.StructArray.from_arrays([pa.array([1]), pa.array(["x"])], names=["a", "a"])
    write(tmp_path / "x.parquet", {"t": pa.ListArray.from_arrays([0, 1], twins)})
    with pytest.raises(InputError, match=r"x\.parquet: two fields in column 't' are named 'a'"):
        open_input(str(tmp_path))


def test_views_of_lists_are_lists_or_refused_by_name(tmp_path: Path) -> None:
    views = pa.array([[1], None, [2, 3]], pa.list_view(pa.int64()))
    write(tmp_path / "x.parquet", {"a": views})
    try:
        views.cast(pa.list_(pa.int64())).validate()
    except pa.ArrowInvalid:  # pyarrow 26 casts them to lists that are none
        with pytest.raises(InputError, match=r"x\.parquet: column 'a' has the type list_view<.*which cannot be read"):
            open_input(str(tmp_path))
    else:
        assert read(tmp_path)[0] == [{"a": [1]}, {"a": None}, {"a": [2, 3]}]


def test_an_empty_table_has_a_schema_and_no_rows(tmp_path: Path) -> None:
    with open_input(str(write(tmp_path / "x.parquet", {"a": pa.array([], pa.string())}))) as dataset:
        assert dataset.schema.names == ["a"] and dataset.num_rows == 0 and read_all(dataset) == ([], {})


def test_choosing_columns_keeps_the_rows_even_where_a_file_has_none_of_them(tmp_path: Path) -> None:
    write(tmp_path / "1.parquet", {"a": [1, 2]})
    write(tmp_path / "2.parquet", {"b": [3], "a.x": [4]})
    with open_input(str(tmp_path)) as dataset:
        assert read_all(dataset.select(["b"]))[0] == [{"b": None}, {"b": None}, {"b": 3}]
        assert read_all(dataset.select(["a.x", "a"]))[0] == [
            {"a.x": None, "a": 1},
            {"a.x": None, "a": 2},
            {"a.x": 4, "a": None},
        ]
        assert read_all(dataset.select([]))[0] == [{}, {}, {}]


REQUIRED = pa.struct([pa.field("a", pa.int64(), nullable=False)])
NESTED: dict[str, tuple[pa.DataType, Any]] = {
    "struct": (REQUIRED, {"a": 1}),
    "list": (pa.list_(pa.field("item", pa.int64(), nullable=False)), [1]),
    "large list": (pa.large_list(pa.field("item", REQUIRED, nullable=False)), [{"a": 1}]),
    "fixed list": (pa.list_(pa.field("item", pa.int64(), nullable=False), 2), [1, 2]),
    "map": (pa.map_(pa.string(), pa.field("value", REQUIRED, nullable=False)), [("k", {"a": 1})]),
    "deep": (pa.struct([pa.field("x", pa.list_(pa.field("item", REQUIRED, nullable=False)))]), {"x": [{"a": 1}]}),
    "views": (pa.large_list(pa.string_view()), ["x"]),
    "fixed views": (pa.list_(pa.string_view(), 1), ["x"]),
    "views in a map": (pa.map_(pa.string_view(), pa.string_view()), [("k", "x")]),
    "nothing": (pa.large_list(pa.null()), [None]),
}


@pytest.mark.parametrize("case", NESTED)
def test_what_may_not_be_null_inside_a_column_is_null_in_a_bad_row_and_where_a_file_lacks_it(
    tmp_path: Path, case: str
) -> None:
    type_, value = NESTED[case]
    write(tmp_path / "1.parquet", {"t": ["a", "x" * 5000], "c": pa.array([value, value], type_)})
    write(tmp_path / "2.parquet", {"t": ["b"]})
    rows, errors = read(tmp_path, max_row_bytes=4000)
    assert [row["t"] for row in rows] == ["a", None, "b"] and list(errors) == [1]
    assert [row["c"] for row in rows] == [value, None, None]
    with open_input(str(tmp_path), max_row_bytes=4000) as dataset:
        table = pa.Table.from_batches([batch.rows for batch in dataset.batches()])
    assert table.cast(dataset.schema).equals(table), "a cast, which planning makes, looks at what may be null"


FAR, NEAR = 253402214400000000, 1_000_000  # microseconds: the last day of the year 9999, and a second
UNFIT: dict[str, tuple[pa.Array, pa.Array, int]] = {
    "an integer no double is equal to": (pa.array([2**53 + 1, 7]), pa.array([0.5]), 2**53 + 1),
    "beyond 64 bits with a sign": (pa.array([2**63 + 5, 7], pa.uint64()), pa.array([-1]), 2**63 + 5),
    "beyond nanoseconds": (pa.array([FAR, NEAR], pa.timestamp("us")), pa.array([5], pa.timestamp("ns")), FAR),
    "in a list": (pa.array([[7, 2**53 + 1], [8]]), pa.array([[0.5]]), 2**53 + 1),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_value_that_the_type_of_all_files_cannot_hold_is_an_error_of_its_row(tmp_path: Path, case: str) -> None:
    column, other, value = UNFIT[case]
    write(tmp_path / "1.parquet", {"t": ["a", "b"], "c": column})
    write(tmp_path / "2.parquet", {"t": ["c"], "c": other})
    with open_input(str(tmp_path)) as dataset:
        batches = list(dataset.batches())
    assert [row for batch in batches for row in batch.rows.column("t").to_pylist()] == [None, "b", "c"]
    assert [list(batch.errors) for batch in batches] == [[0], []]
    assert batches[0].rows.column("c").cast(column.type).slice(1).equals(column.slice(1))
    error = batches[0].errors[0]
    assert error.code == "bad_input" and "1.parquet: row 0: column 'c' is " in error.message
    assert str(value) in error.message and "one type in all files" in error.message


def test_a_value_that_does_not_fit_is_found_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    """A batch is joined of what is decoded a few rows at a time."""
    write(
        tmp_path / "1.parquet", {"id": list(range(100)), "c": [2**53 + 1 if row == 70 else row for row in range(100)]}
    )
    write(tmp_path / "2.parquet", {"id": [100], "c": [0.5]})
    rows, errors = read(tmp_path)
    assert [row["id"] for row in rows] == [*range(70), None, *range(71, 101)]
    assert list(errors) == [70] and "1.parquet: row 70: column 'c'" in errors[70].message


def test_timestamps_of_spark_and_hive_reach_the_year_9999(tmp_path: Path) -> None:
    stamps = [datetime(1, 1, 1), datetime(2024, 2, 29, 1, 2, 3, 4), datetime(9999, 12, 31)]
    column = pa.array(stamps, pa.timestamp("us"))
    path = write(tmp_path / "x.parquet", {"valid_to": column}, use_deprecated_int96_timestamps=True)
    assert pq.ParquetFile(path).schema.column(0).physical_type == "INT96"
    assert read(path) == ([{"valid_to": stamp} for stamp in stamps], {})


def test_a_long_text_that_many_rows_share_comes_in_batches_of_the_usual_size(tmp_path: Path) -> None:
    """A file holds such a text once: its bytes tell nothing of a batch's."""
    text = "0123456789" * 50_000
    shared = pa.DictionaryArray.from_arrays(pa.array([0] * 500, pa.int32()), [text])
    for number, column in enumerate((shared, pa.array([text] * 500), pa.array([[{"content": text}]] * 500))):
        path = write(tmp_path / f"{number}.parquet", {"id": list(range(500)), "t": column})
        assert path.stat().st_size < 100_000
        with open_input(str(path)) as dataset:
            sizes = [(batch.rows.num_rows, batch.rows.nbytes) for batch in dataset.batches()]
        assert sum(rows for rows, _ in sizes) == 500
        assert max(nbytes for _, nbytes in sizes) < 3 * MAX_BATCH_BYTES


def test_small_rows_still_come_in_large_batches(tmp_path: Path) -> None:
    with open_input(str(write(tmp_path / "x.parquet", {"id": list(range(5000))}))) as dataset:
        assert [batch.rows.num_rows for batch in dataset.batches()] == [1024] * 4 + [904]


@given(flips=st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 7)), min_size=1, max_size=3))
@example(flips=[(8137, 1)])  # a row group's number of rows
@example(flips=[(4890, 0)])  # the number of row groups
@example(flips=[(4495, 7)])  # a column's name is no text any more
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bits_anywhere_are_an_input_error_or_lose_no_row(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    """Pages have checksums; the footer has none (a name is then another name), but its numbers must agree."""
    columns = {"a": list(range(300)), "m": [[{"role": "user", "content": str(n)}] for n in range(300)]}
    path = write(tmp_path / "x.parquet", columns, row_group_size=70, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    places = [place % len(data) for place, _ in flips]
    for place, (_, bit) in zip(places, flips, strict=True):
        data[place] ^= 1 << bit
    path.write_bytes(data)
    try:
        rows, errors = read(path)
    except InputError as error:
        assert "x.parquet" in str(error)
        return
    assert (len(rows), errors) == (300, {})
    assert rows == pa.table(columns).to_pylist() or max(places) >= footer


rows_of_table = st.lists(
    st.fixed_dictionaries(
        {
            "i": st.none() | st.integers(-(2**63), 2**63 - 1),
            "t": st.none() | st.text(max_size=5),
            "l": st.none() | st.lists(st.floats(allow_nan=False), max_size=3),
        }
    ),
    max_size=40,
)
SCHEMA = pa.schema([("i", pa.int64()), ("t", pa.string()), ("l", pa.list_(pa.float64()))])


@given(table=rows_of_table, group=st.integers(1, 13), start=st.integers(0, 41), limit=st.integers(0, 41))
@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_table_comes_back_from_any_position_up_to_any_limit(
    tmp_path: Path, table: list[dict[str, Any]], group: int, start: int, limit: int
) -> None:
    pq.write_table(pa.Table.from_pylist(table, SCHEMA), tmp_path / "x.parquet", row_group_size=group)
    with open_input(str(tmp_path)) as dataset:
        assert read_all(dataset)[0] == table
        assert read_all(dataset, Position(0, start), limit=limit)[0] == table[start : start + limit]
