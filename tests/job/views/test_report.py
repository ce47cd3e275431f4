"""The report of a run beside what its parts hold, counted here."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from statistics import fmean

import pyarrow.parquet as pq
import pytest

from bulkrun.data.storage.durable import append_line
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.report import read_report
from tests.job.embedding_runs import embedding_job, submit, write_texts
from tests.job.small_runs import Row, job, make_rows, start
from tests.job.work.test_runner import StopAfter


def test_numbers_are_those_of_the_parts(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(out, make_rows(60), job(out, n=2, max_tokens=40))
    found = read_report(RunDir(out))
    rows = pq.read_table(out).to_pylist()
    answered = [row for row in rows if row["error_code"] is None]
    assert found.ends == dict(Counter(row["finish_reason"] for row in rows).most_common())
    assert found.errors.counts == {"bad_input": len(rows) - len(answered)}
    assert [one.column for one in found.lengths] == ["prompt_tokens", "completion_tokens"]
    for one in found.lengths:
        tokens = sorted(row[one.column] for row in answered)
        assert (one.rows, one.least, one.most) == (len(tokens), tokens[0], tokens[-1])
        assert one.mean == pytest.approx(fmean(tokens))
        for share, number in ((0.5, one.median), (0.9, one.p90), (0.99, one.p99)):
            at_most = sum(token <= number for token in tokens)
            assert number in tokens and at_most >= share * len(tokens)
        assert one.bins == [sum(token // one.bin_tokens == bin_ for token in tokens) for bin_ in range(len(one.bins))]
        assert len(one.bins) <= 32
    assert found.timeline is not None
    assert (sum(found.timeline.rows), sum(found.timeline.error_rows)) == (len(rows), len(rows) - len(answered))
    assert found.events == {"started": 1, "completed_with_errors": 1} and found.working_s is not None


def test_a_run_of_many_commits_has_few_intervals_and_all_its_rows(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(out, make_rows(20), job(out))
    RunDir(out).events.unlink()
    for second in range(0, 7000, 7):
        event = {"time": f"2026-11-26T{second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.000Z", "worker": "w"}
        append_line(RunDir(out).events, json.dumps({**event, "event": "committed", "rows": 3, "errors": 1}).encode())
    for torn in (
        b'{"time": "yesterday", "event": "committed", "rows": 9}',
        b'{"time": "2026-11-26", "event": "x"}',
        b"{",
    ):
        append_line(RunDir(out).events, torn)
    found = read_report(RunDir(out))
    assert found.timeline is not None and len(found.timeline.rows) <= 61
    assert (sum(found.timeline.rows), sum(found.timeline.error_rows)) == (3000, 1000)
    assert found.working_s == 6993


def test_a_run_without_a_part_has_a_report_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(out, make_rows(40), job(out, max_tokens=60), should_stop=StopAfter(25), shard_rows=40)
    found = read_report(RunDir(out))
    assert (found.status.state, found.ends, found.lengths, found.timeline) == ("interrupted", {}, [], None)
    assert found.errors.counts == {"bad_input": 6}


def test_a_run_in_which_every_row_failed_has_a_report_too(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(out, [Row(number, f"id-{number}", None, error_code="bad_input") for number in range(5)], job(out))
    found = read_report(RunDir(out))
    assert (found.status.state, found.ends, found.lengths) == ("completed_with_errors", {"error": 5}, [])
    assert found.errors.counts == {"bad_input": 5}


def test_a_run_of_vectors_has_lengths_of_texts_alone(tmp_path: Path) -> None:
    submit(embedding_job(write_texts(tmp_path, 30), tmp_path / "out"))
    found = read_report(RunDir(tmp_path / "out"))
    assert found.ends == {} and [one.column for one in found.lengths] == ["prompt_tokens"]


def test_time_at_work_leaves_pauses_out_and_counts_once_what_two_do_together(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start(out, make_rows(20), job(out))
    RunDir(out).events.unlink()
    for worker, minutes in (("a", (0, 3, 10)), ("b", (5, 20)), ("c", (55, 58)), ("-", (59,))):
        for minute in minutes:
            event = {"time": f"2026-11-26T01:{minute:02}:00.000Z", "worker": worker, "event": "x"}
            append_line(RunDir(out).events, json.dumps(event).encode())
    assert read_report(RunDir(out)).working_s == (20 + 3) * 60
