"""What a running job shows: whole lines in a log, one view on a terminal, nothing when asked for nothing."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from bulkrun.cli import live
from bulkrun.cli.live import LineView, LiveView, QuietView, make_view, progress_line
from bulkrun.cli.output import cell_text, duration
from bulkrun.job.work.progress import ProgressSnapshot

SNAPSHOT = ProgressSnapshot(
    rows_total=2000,
    rows_done=500,
    error_rows=3,
    prompt_tokens_per_s=1234.5,
    completion_tokens_per_s=99.6,
    kv_cache_usage=0.43,
    num_running=64,
    num_waiting=128,
    elapsed_s=75,
    eta_s=3725,
    plan_complete=True,
)


def test_the_line_has_every_number() -> None:
    assert progress_line(SNAPSHOT) == (
        "500/2,000 rows (25%), 1,234 tok/s in, 100 tok/s out, 64 running, 128 waiting, KV 43%, 3 errors, 1 h 2 min left"
    )


def test_before_anything_is_known_the_line_does_not_pretend(capsys: pytest.CaptureFixture[str]) -> None:
    assert progress_line(ProgressSnapshot()).startswith("0/0+ rows (0%)")
    assert progress_line(ProgressSnapshot()).endswith("? left")


def test_a_log_gets_one_line_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    view = LineView(clock=lambda: now[0])
    for second in range(200):
        now[0] = second
        view.update(SNAPSHOT)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d 500/2,000 rows .*", line) for line in lines)


def test_quiet_and_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_view(quiet=True)) is QuietView
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert type(make_view(quiet=False)) is LineView


def test_the_live_view_draws_the_numbers() -> None:
    view = LiveView()
    try:
        console = Console(width=140, file=io.StringIO(), force_terminal=False)
        console.print(view._draw())
        view.update(SNAPSHOT)
        view.phase("running")
        console.print(view._draw())
    finally:
        view.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("starting", "500 of 2,000 rows", "1 h 2 min left", "64", "128", "43%", "running"):
        assert part in shown


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_no_number_of_the_live_view_is_cut_or_folded(width: int) -> None:
    view = LiveView()
    try:
        view.update(replace(SNAPSHOT, rows_total=12_345_678, rows_done=2_345_678))
        view.phase("running")
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        console.print(view._draw())
    finally:
        view.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    facts = "in 1,234 tok/s|out 100 tok/s|running 64|waiting 128|KV cache 43%|errors 3|time 1 min 15 s|now running"
    for fact in ("19%", "2,345,678 of 12,345,678 rows", "1 h 2 min left", *facts.split("|")):
        assert fact in shown, shown
    assert "━" in shown and max(map(len, shown.splitlines())) <= width


def test_a_cell_shows_control_characters_instead_of_sending_them() -> None:
    assert cell_text("red \x1b[31m and \x07\nnext") == "red \\x1b[31m and \\x07\nnext"
    assert (cell_text(None), cell_text(0.12345), cell_text(12345.6)) == ("-", "0.1235", "12,346")


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0.4, "0 s"), (59.6, "1 min 0 s"), (7320, "2 h 2 min")])
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


def test_one_line_a_minute_is_what_the_readme_says() -> None:
    assert live.LINE_EVERY_S == 60
