from __future__ import annotations

import pyarrow as pa
import pytest

from bulkrun.data.results.schema import (
    RESULT_FIELDS,
    RESULT_NAMES,
    check_columns,
    output_schema,
    passable,
    passthrough_schema,
)
from bulkrun.errors import InputError

INPUT = pa.schema([pa.field("title", pa.string(), nullable=False), ("n", pa.int64())])


def test_the_output_has_the_input_columns_first_and_then_the_result_columns() -> None:
    assert output_schema(passthrough_schema(INPUT, None)).names == [
        *("title", "n", "row", "sample", "response", "finish_reason"),
        *("prompt_tokens", "completion_tokens", "error_code", "error_message"),
    ]


def test_chosen_columns_keep_the_order_of_the_choice_once_each() -> None:
    assert passthrough_schema(INPUT, ["n", "title", "n"]).names == ["n", "title"]
    assert passthrough_schema(INPUT, []).names == []


def test_the_id_comes_first_where_the_choice_leaves_it_out_unless_a_result_column_has_its_name() -> None:
    assert passthrough_schema(INPUT, ["title"], id_column="n").names == ["n", "title"]
    assert passthrough_schema(INPUT, ["title", "n"], id_column="n").names == ["title", "n"]
    assert passthrough_schema(INPUT.append(pa.field("Row", pa.int64())), ["n"], id_column="Row").names == ["n"]


def test_columns_that_pass_through_may_be_null_because_unreadable_rows_are_and_bring_no_notes() -> None:
    assert all(field.nullable for field in passthrough_schema(INPUT, None))
    told = pa.schema([pa.field("n", pa.int64(), metadata={"PARQUET:field_id": "7"})])
    assert passthrough_schema(told, None).equals(pa.schema([("n", pa.int64())]), check_metadata=True)


@pytest.mark.parametrize("name", sorted(RESULT_NAMES))
def test_a_column_named_like_a_result_column_is_refused_with_both_ways_out(name: str) -> None:
    schema = INPUT.append(pa.field(name, pa.string()))
    with pytest.raises(InputError) as caught:
        passthrough_schema(schema, None)
    assert all(words in str(caught.value) for words in (repr(name), "input.columns: [title, n]", "input.sql"))
    assert passthrough_schema(schema, ["title"]).names == ["title"]


@pytest.mark.parametrize(("name", "result"), [("Response", "response"), ("ROW", "row"), ("Parsed", "parsed")])
def test_a_column_that_sql_takes_for_a_result_column_is_refused(name: str, result: str) -> None:
    schema = INPUT.append(pa.field(name, pa.string()))
    with pytest.raises(InputError, match=f"column '{name}' is named like the result column '{result}' .*no case"):
        passthrough_schema(schema, None, [*RESULT_FIELDS, pa.field("parsed", pa.string())])
    assert passthrough_schema(schema, ["title"]).names == ["title"]


def test_two_columns_that_differ_only_in_case_are_refused() -> None:
    schema = pa.schema([("ID", pa.int64()), ("n", pa.int64()), ("id", pa.string())])
    with pytest.raises(InputError, match=r"'ID' and 'id' differ only in case.*input\.columns: \[ID, n\]"):
        passthrough_schema(schema, None)
    assert passthrough_schema(schema, ["id", "n"]).names == ["id", "n"]
    beyond_ascii = pa.schema([("\u00dc", pa.int64()), ("\u00fc", pa.int64())])
    assert passthrough_schema(beyond_ascii, None).names == ["\u00dc", "\u00fc"], "DuckDB tells these apart"


def test_passable_columns_are_those_that_are_not_refused() -> None:
    schema = pa.schema([(name, pa.int64()) for name in ("ID", "row", "n", "Response", "id", "\u00dc", "\u00fc")])
    kept = passable(schema.names)
    assert passthrough_schema(schema, kept).names == kept == ["ID", "n", "\u00dc", "\u00fc"]


def test_an_unknown_column_names_the_key_and_the_nearest_one() -> None:
    with pytest.raises(InputError, match=r"input\.columns: the input has no column 'titel'; did you mean 'title'\?"):
        passthrough_schema(INPUT, ["titel"])
    with pytest.raises(InputError, match=r"prompt\.column: .* 'zzz'; it has title, n"):
        check_columns(INPUT, ["zzz"], "prompt.column")
