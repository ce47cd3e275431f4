from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from bulkrun.job.plan import ids as ids_module
from bulkrun.job.plan.ids import find_duplicates, hash_ids, write_ids

windows = st.lists(
    st.lists(st.none() | st.sampled_from(["a", "b", "ä", "1", "x y", ""]) | st.text(max_size=2), max_size=9)
)


@settings(max_examples=80)
@given(windows, st.integers(1, 8))
def test_duplicates_equal_a_count_in_memory_however_they_are_split(
    windows: list[list[str | None]], slice_ids: int
) -> None:
    rows_of: dict[str, list[int]] = defaultdict(list)
    row = 0
    with TemporaryDirectory() as folder, patch.object(ids_module, "SLICE_IDS", slice_ids):
        paths = [Path(folder, f"ids-{number}") for number in range(len(windows))]
        for path, window in zip(paths, windows, strict=True):
            write_ids(path, [hash_ids(window, row)])
            for text in window:
                if text is not None:
                    rows_of[text].append(row)
                row += 1
        found = find_duplicates(paths)
    repeated = sorted(rows[:3] for rows in rows_of.values() if len(rows) > 1)
    assert found.repeats == sum(len(rows) - 1 for rows in rows_of.values())
    assert found.examples == repeated[:3]
