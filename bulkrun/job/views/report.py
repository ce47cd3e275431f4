"""What became of a run, for people and for a record: rows and errors, lengths, speed over time, who worked, what broke.

Of what is committed: parts, events, heartbeats and totals. Pure data; drawing it is the command line's, and
`report_page`'s.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from bulkrun.data.results.query import run_query
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.views.row_errors import ErrorReport, read_row_errors
from bulkrun.job.views.status import RunStatus, read_status

_MOST_INTERVALS = 60
_MOST_BINS = 32
_MOST_LABELS = 50
# By task: what the job has made of each row. The input may have columns of the other tasks' names.
_ENDS = {"generate": "finish_reason", "classify": "label"}
_COUNTED = {"generate": ("prompt_tokens", "completion_tokens")}


@dataclass(frozen=True)
class Lengths:
    """How long the rows without an error are, in tokens: `bins` has the number of rows in each `bin_tokens` from 0."""

    column: str
    rows: int
    mean: float
    least: int
    median: int
    p90: int
    p99: int
    most: int
    bin_tokens: int
    bins: list[int]


@dataclass(frozen=True)
class Timeline:
    """Output rows that were committed in each `interval_s` from `began`, and how many of them failed."""

    began: str
    interval_s: float
    rows: list[int]
    error_rows: list[int]


@dataclass(frozen=True)
class RunReport:
    """A run at one moment. `ends` counts finish reasons, or the labels of a run that classifies; most frequent first.

    `events` counts what happened beside commits. `working_s`: how long somebody was at work, by the events of those who
    were; None where nobody has been.
    """

    status: RunStatus
    model: str
    job_file: str | None
    overrides: list[str]
    versions: dict[str, str]
    working_s: float | None
    ends: dict[str, int]
    lengths: list[Lengths]
    errors: ErrorReport
    timeline: Timeline | None
    events: dict[str, int]


def read_report(run: RunDir) -> RunReport:
    """Look at a run, finished or not. Raises RunError when the directory is not a run or a part is damaged."""
    record, status = read_record(run), read_status(run)
    columns = _columns(run) if run.parts() else []
    events, counted = list(read_events(run)), _COUNTED.get(record.task, ("prompt_tokens",))
    return RunReport(
        status=status,
        model=str(record.job["model"]),
        job_file=record.job_file,
        overrides=record.overrides,
        versions=record.versions,
        working_s=_working_s(events),
        ends=_ends(run, _ENDS.get(record.task), columns),
        lengths=[found for column in counted if column in columns and (found := _lengths(run, column)) is not None],
        errors=read_row_errors(run, examples=3),
        timeline=_timeline(events),
        events=dict(Counter(str(event.get("event")) for event in events if event.get("event") != "committed")),
    )


def _columns(run: RunDir) -> list[str]:
    return list(run_query(run.root, "SELECT * FROM results LIMIT 0").column_names)


def _ends(run: RunDir, name: str | None, columns: Sequence[str]) -> dict[str, int]:
    if name not in columns:
        return {}
    sql = f"SELECT {name}, count(*) FROM results WHERE {name} IS NOT NULL GROUP BY 1 ORDER BY 2 DESC, 1"
    table = run_query(run.root, sql, limit=_MOST_LABELS)
    return dict(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _lengths(run: RunDir, column: str) -> Lengths | None:
    """Of rows that have an answer; None where none has."""
    answered = f"FROM results WHERE error_code IS NULL AND {column} IS NOT NULL"
    numbers = f"count(*), avg({column}), min({column}), max({column}), quantile_disc({column}, [0.5, 0.9, 0.99])"
    [[rows], [mean], [least], [most], [quantiles]] = _values(run, f"SELECT {numbers} {answered}")
    if not rows:
        return None
    median, p90, p99 = quantiles
    width = most // _MOST_BINS + 1
    bins = dict(zip(*_values(run, f"SELECT {column} // {width}, count(*) {answered} GROUP BY 1"), strict=True))
    filled = [int(bins.get(number, 0)) for number in range(most // width + 1)]
    return Lengths(column, rows, mean, least, median, p90, p99, most, width, filled)


def _values(run: RunDir, sql: str) -> list[list[Any]]:
    return [column.to_pylist() for column in run_query(run.root, sql).columns]


def _timeline(events: Iterable[dict[str, Any]]) -> Timeline | None:
    """Of the commits and what lies around them; None where nothing was committed."""
    times = [(time, event) for event in events if (time := _time(event)) is not None]
    if not any(event.get("event") == "committed" for _, event in times):
        return None
    began = min(time for time, _ in times)
    commits = [((time - began).total_seconds(), event) for time, event in times if event.get("event") == "committed"]
    span = max(second for second, _ in commits)
    interval_s = max(1.0, span / _MOST_INTERVALS)
    rows, failed = ([0] * (int(span / interval_s) + 1) for _ in range(2))
    for second, event in commits:
        rows[int(second / interval_s)] += int(event.get("rows", 0))
        failed[int(second / interval_s)] += int(event.get("errors", 0))
    return Timeline(began.isoformat(timespec="seconds"), interval_s, rows, failed)


def _working_s(events: Iterable[dict[str, Any]]) -> float | None:
    """Seconds in which at least one worker was between its first event and its last one."""
    seen: dict[str, list[datetime]] = {}
    for event in events:
        if event.get("worker", "-") != "-" and (time := _time(event)) is not None:
            seen.setdefault(str(event["worker"]), []).append(time)
    working, until = timedelta(), None
    for first, last in sorted((min(times), max(times)) for times in seen.values()):
        working += max(timedelta(), last - (first if until is None else max(first, until)))
        until = last if until is None else max(until, last)
    return working.total_seconds() if seen else None


def _time(event: dict[str, Any]) -> datetime | None:
    """When an event was, by the clock of whoever wrote it; None for a line that says nothing of the kind."""
    try:
        time = datetime.fromisoformat(str(event.get("time")))
    except ValueError:
        return None
    return time if time.tzinfo else None
