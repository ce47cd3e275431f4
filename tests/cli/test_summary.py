"""What `submit` says of a finished run that nobody had to compute."""

from __future__ import annotations

from dataclasses import replace

from bulkrun.cli.jobs import _saved
from bulkrun.job.work.finish import RunTotals

TOTALS = RunTotals("completed", 9, 1, 9, {}, 90, 9, 1, "run", "then", "now")


def test_the_summary_says_what_was_saved_and_is_silent_where_nothing_was() -> None:
    assert _saved(TOTALS) == ""
    assert _saved(replace(TOTALS, saved_generations=1234)) == "1,234 generations answered by another row's"
    everything = replace(TOTALS, saved_generations=2, cached_tokens=3, stopped=4)
    assert _saved(everything).split(", ", 1)[1].startswith("3 prompt tokens found in the prefix cache, 4 outputs")
