"""What `submit` says of a finished run that nobody had to compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bulkrun.cli.jobs import _saved, _warn_of_duplicates
from bulkrun.job.work.finish import RunTotals

TOTALS = RunTotals("completed", 9, 1, 9, {}, 90, 9, 1, "run", "then", "now")


def test_the_summary_says_what_was_saved_and_is_silent_where_nothing_was() -> None:
    assert _saved(TOTALS) == ""
    assert _saved(replace(TOTALS, saved_generations=1234)) == "1,234 generations answered by another row's"
    everything = replace(TOTALS, saved_generations=2, cached_tokens=3, stopped=4)
    assert _saved(everything).split(", ", 1)[1].startswith("3 prompt tokens found in the prefix cache, 4 outputs")


def test_the_summary_names_ids_that_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    _warn_of_duplicates({"count": 0, "examples": []})
    assert capsys.readouterr().err == ""
    _warn_of_duplicates({"count": 1200, "examples": [{"id": "f0", "rows": [0, 5]}]})
    assert capsys.readouterr().err == (
        "  1,200 rows have an id that an earlier row has ('f0' in rows 0, 5): `row` tells them apart\n"
    )
