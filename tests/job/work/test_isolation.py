"""Suspects run alone, in groups: those of the latest crash first, in the order in which they were given."""

from __future__ import annotations

import pytest

from bulkrun.errors import RunError
from bulkrun.job.work.isolation import Isolation
from bulkrun.job.work.shard_work import Generation
from bulkrun.request import Request


def generations(*rows: int) -> list[Generation]:
    return [Generation(Request(f"{row}:0", [1]), 0, (row,), 0) for row in rows]


def test_groups_run_in_their_order_and_what_crashes_is_split_before_the_next_one_runs() -> None:
    isolation = Isolation()
    isolation.suspect([generations(0), generations(*range(1, 17)), generations(17)])
    assert isolation.next_group() == generations(0)
    isolation.crashed(isolation.next_group(), RuntimeError("device-side assert"))
    ran = []
    while group := isolation.next_group():
        assert isolation.active, "nobody may join a group that runs, not even the last"
        ran.append([generation.rows[0] for generation in group])
    assert not isolation.active
    assert ran == [[row, row + 1] for row in range(1, 17, 2)] + [[17]]


def test_who_shows_that_the_engine_runs_comes_from_far_away() -> None:
    """Rows that are alike stand together, and all of them may crash it."""
    isolation = Isolation()
    isolation.suspect([generations(row) for row in range(9)])
    isolation.crashed(isolation.next_group(), RuntimeError("device-side assert"))
    assert isolation.next_group() == generations(8)
    assert [generation.rows for generation, _ in isolation.convicted()] == [(0,)]
    assert isolation.next_group() == generations(1)


@pytest.mark.parametrize(("others", "rows"), [(False, 3), (True, 8)])
def test_an_engine_that_ran_something_before_is_not_broken_by_a_few_rows(others: bool, rows: int) -> None:
    """They may be the last that are left; else every start ends with them."""
    isolation = Isolation()
    if others:
        assert isolation.convicted() == []
    isolation.suspect([generations(row) for row in range(rows)])
    for _ in range(rows - 1):
        isolation.crashed(isolation.next_group(), RuntimeError("device-side assert"))
    with pytest.raises(RunError, match="no row is to blame"):
        isolation.crashed(isolation.next_group(), RuntimeError("device-side assert"))
