"""A row's key: equal for what must have one result, different for all else."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.plan.row_key import row_keys
from bulkrun.job.store.fingerprint import KeySalt

ROWS = st.lists(
    st.tuples(st.none() | st.lists(st.integers(0, 5), max_size=4), st.none() | st.sampled_from(["{}", "1"]))
)


def table(rows: list[tuple[list[int] | None, str | None]]) -> pa.Table:
    return pa.table(
        {
            "token_ids": pa.array([tokens for tokens, _ in rows], pa.list_(pa.int32())),
            "overrides": pa.array([overrides for _, overrides in rows], pa.string()),
            "error_code": pa.array(["bad_input" if tokens is None else None for tokens, _ in rows], pa.string()),
            "passthrough": pa.array([{}] * len(rows), pa.struct([])),
        }
    )


def refused(codes: list[str], payload: pa.StructArray) -> pa.Table:
    columns = {"token_ids": pa.nulls(len(codes), pa.list_(pa.int32())), "overrides": pa.nulls(len(codes), pa.string())}
    return pa.table({**columns, "error_code": codes, "passthrough": payload})


@settings(max_examples=60)
@given(ROWS, ROWS)
def test_keys_are_equal_if_and_only_if_tokens_and_overrides_are(
    one: list[tuple[list[int] | None, str | None]], other: list[tuple[list[int] | None, str | None]]
) -> None:
    chunked = pa.concat_tables([table(one), table(other)])
    keys = row_keys(chunked, KeySalt("salt"))
    assert keys == [*row_keys(table(one), KeySalt("salt")), *row_keys(table(other), KeySalt("salt"))]
    rows = [*one, *other]
    told_by = [repr(row) if row[0] is not None else "refused" for row in rows]
    assert len(set(keys)) == len(set(told_by)) == len({*zip(keys, told_by, strict=True)})


def test_a_slice_has_the_keys_of_its_rows() -> None:
    whole = table([([1, 2], None), ([3], None), ([4, 5, 6], "{}"), (None, None)])
    batch = whole.combine_chunks().to_batches()[0]
    assert row_keys(batch.slice(1, 2), KeySalt("s")) == row_keys(whole, KeySalt("s"))[1:3]


def test_another_salt_is_another_key() -> None:
    one = table([([1], None)])
    assert row_keys(one, KeySalt("a")) != row_keys(one, KeySalt("b"))


def test_a_row_has_another_key_where_its_own_adapter_is_another() -> None:
    rows = table([([1], None), ([1], '{"adapter":"legal"}'), ([1], '{"adapter":"poems","seed":3}')])
    keys, others = (row_keys(rows, KeySalt("s", {"legal": "1", "poems": poems})) for poems in "23")
    assert keys[:2] == others[:2] and keys[2] != others[2] and len({*keys}) == 3
    assert keys[0] == row_keys(table([([1], None)]), KeySalt("s"))[0], "as in a job without adapters"


def test_the_key_of_a_refused_row_is_of_its_code_and_of_what_passes_through_whatever_that_is() -> None:
    late = pa.scalar(2**62, pa.timestamp("s", "UTC"))  # beyond the years of Python
    times = pa.array([1, 1, 2, 1, 1], pa.timestamp("ns", "Europe/Berlin"))
    payload = pa.StructArray.from_arrays(
        [times, pa.array([[1], [1], [1], None, [1]]), pa.array([late] * 5)], ["at", "marks", "late"]
    )
    keys = row_keys(refused(["bad_input"] * 4 + ["empty_prompt"], payload), "s")
    assert keys[0] == keys[1] != keys[4]
    assert keys[0] == row_keys(refused(["bad_input"], payload.slice(1, 1)), "another salt")[0]
    assert len({keys[0], keys[3], keys[4]}) == 3
