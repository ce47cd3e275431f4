"""What a difference shows of values that do not fit into a line."""

from __future__ import annotations

from bulkrun.job.store.difference_lines import difference_lines


def test_a_difference_of_long_values_shows_where_they_part() -> None:
    prompt = "Summarize the ticket in one sentence of at most twenty words, "
    [line] = difference_lines({"prompt.template": (prompt + "politely: {{ text }}", prompt + "briefly: {{ text }}")})
    assert "... most twenty words, politely: {{ text }}' -> ... most twenty words, briefly: {{ text }}'" in line
    [line] = difference_lines({"prompt.template": ("x" * 1000, "y" * 1000)})
    assert len(line) < 160 and "'xxx" in line and "'yyy" in line


def test_a_difference_of_files_counts_those_that_are_others() -> None:
    files = [[size, 0, f"{size}"] for size in range(200)]
    for new, shown in [
        ([*files[:7], [7, 1, "seven"], *files[8:]], "200 -> 200 files, 1 new or changed"),
        ([*files, [9, 9, "x"]], "200 -> 201 files, 1 new or changed"),
        (files[1:], "200 -> 199 files"),
        (files[::-1], "200 -> 200 files, in another order"),
    ]:
        assert difference_lines({"input.files": (files, new)}) == [f"  input.files: {shown}"]
