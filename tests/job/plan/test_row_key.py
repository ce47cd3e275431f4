"""A row's key: equal for what must have one result, different for all else."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.plan.row_key import row_keys

ROWS = st.lists(
    st.tuples(st.none() | st.lists(st.integers(0, 5), max_size=4), st.none() | st.sampled_from(["{}", "1"]))
)


def table(rows: list[tuple[list[int] | None, str | None]]) -> pa.Table:
    return pa.table(
        {
            "token_ids": pa.array([tokens for tokens, _ in rows], pa.list_(pa.int32())),
            "overrides": pa.array([overrides for _, overrides in rows], pa.string()),
        }
    )


@settings(max_examples=60, deadline=None)
@given(ROWS, ROWS)
def test_keys_are_equal_if_and_only_if_tokens_and_overrides_are(
    one: list[tuple[list[int] | None, str | None]], other: list[tuple[list[int] | None, str | None]]
) -> None:
    chunked = pa.concat_tables([table(one), table(other)])
    keys = row_keys(chunked, "salt")
    assert keys == [*row_keys(table(one), "salt"), *row_keys(table(other), "salt")]
    rows = [*one, *other]
    for key, (tokens, _) in zip(keys, rows, strict=True):
        assert (key is None) == (tokens is None)
    seen: dict[str, object] = {}
    for key, row in zip(keys, rows, strict=True):
        if key is not None:
            assert seen.setdefault(key, row) == row
    assert len(seen) == len({repr(row) for row in rows if row[0] is not None})


def test_a_slice_has_the_keys_of_its_rows() -> None:
    whole = table([([1, 2], None), ([3], None), ([4, 5, 6], "{}"), (None, None)])
    batch = whole.combine_chunks().to_batches()[0]
    assert row_keys(batch.slice(1, 2), "s") == row_keys(whole, "s")[1:3]


def test_another_salt_is_another_key() -> None:
    one = table([([1], None)])
    assert row_keys(one, "a") != row_keys(one, "b")
