"""What commands print on a terminal obeys nobody but them: data cannot move the cursor, hide or turn text around."""

from __future__ import annotations

import io
import json
import re
import sys
from functools import partial
from typing import Any

import pytest
from click.testing import CliRunner

import bulkrun.launch.runs.preview
from bulkrun.cli import main
from bulkrun.cli.output import print_json, print_table
from bulkrun.job.views.row_errors import ErrorReport, ErrorRow
from bulkrun.launch.runs.preview import PreviewedRow

HOSTILE = "\x1b[2J\x1b]0;name\x07 \x9b31m \x85 \u202ereversed\u2066 \U000e0001 é 好"
RAW = ("\x1b[2J", "\x1b]", "\x07", "\x9b", "\x85", "\u202e", "\u2066", "\U000e0001")


class Stream(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal

    def isatty(self) -> bool:
        return self._terminal


def printed(monkeypatch: pytest.MonkeyPatch, function: Any, *arguments: Any, terminal: bool = True) -> str:
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stdout", stream)
    function(*arguments)
    monkeypatch.undo()
    return stream.getvalue()


def test_a_table_shows_control_characters_in_cells_and_names(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = printed(monkeypatch, print_table, [HOSTILE], [[HOSTILE]])
    assert not [ch for ch in RAW if ch in shown]
    assert shown.count("\\x1b[2J") == 2 and "好" in shown


def test_a_cell_is_clipped_to_so_many_lines_as_its_column_folds_it_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")  # on a dumb one rich has 80 columns, whatever is said
    rows = [["a", "x" * 200], ["b", "one\ntwo\nthree\nfour"], ["c", "one\ntwo\nthree"]]
    shown = printed(monkeypatch, partial(print_table, max_lines=3), ["name", "text"], rows)
    assert max(map(len, shown.splitlines()[1:])) <= 40
    a, b, c = (part.split() for part in re.split(r"^[abc] ", shown, flags=re.MULTILINE)[1:])
    assert len(a) == 3 and a[2].endswith("x…") and len(a[2]) == len(a[0])
    assert (b, c) == (["one", "two", "three…"], ["one", "two", "three"])
    assert "four" in printed(monkeypatch, print_table, ["name", "text"], rows)


def test_json_on_a_terminal_shows_what_it_would_obey_and_is_the_same_json(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = printed(monkeypatch, print_json, {HOSTILE: HOSTILE})
    assert not [ch for ch in RAW if ch in shown]
    assert "é 好" in shown and json.loads(shown) == {HOSTILE: HOSTILE}
    piped = printed(monkeypatch, print_json, {"a": "\u202e"}, terminal=False)
    assert piped == '{"a": "\u202e"}\n'


SHOWN = PreviewedRow(HOSTILE, HOSTILE, HOSTILE, ended_by="stop")


def test_preview_shows_control_characters_of_a_rows_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(bulkrun.launch.runs.preview, "preview_job", lambda *_: [SHOWN])
    (tmp_path / "job.yaml").write_text("name: a\nmodel: bundled:tiny\ninput: {path: x}\noutput: {path: y}\n")
    result = CliRunner().invoke(main, ["preview", str(tmp_path / "job.yaml")], color=True, catch_exceptions=False)
    assert "\\x1b[2J" in result.stdout.splitlines()[0]
    assert not [ch for ch in RAW if ch in result.stdout]


@pytest.mark.parametrize(("samples", "columns"), [((0, 0), "row code message"), ((0, 1), "row sample code message")])
def test_errors_of_several_samples_of_a_row_are_told_apart(
    samples: tuple[int, int], columns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    rows = [ErrorRow(7, None, sample, "timeout", "too slow") for sample in samples]
    report = ErrorReport({"timeout": 2}, {"timeout": rows})
    monkeypatch.setattr("bulkrun.job.store.run_record.read_record", lambda _: None)
    monkeypatch.setattr("bulkrun.job.views.row_errors.read_row_errors", lambda *_, **__: report)
    shown = CliRunner().invoke(main, ["errors", str(tmp_path)], catch_exceptions=False).stdout
    assert columns.split() in [line.split() for line in shown.splitlines()]


@pytest.mark.parametrize(("response", "shown"), [(None, ["calls"]), ("Well.", ["response", "calls"])])
def test_preview_shows_calls_beside_what_is_said(
    response: str | None, shown: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    row = SHOWN._replace(prompt="a", response=response, tool_calls=[{"id": "1", "name": "f", "arguments": '{"x": 1}'}])
    monkeypatch.setattr(bulkrun.launch.runs.preview, "preview_job", lambda *_: [row])
    (tmp_path / "job.yaml").write_text("name: a\nmodel: bundled:tiny\ninput: {path: x}\noutput: {path: y}\n")
    lines = (
        CliRunner().invoke(main, ["preview", str(tmp_path / "job.yaml")], catch_exceptions=False).stdout.splitlines()
    )
    assert [line.split()[0] for line in lines if line.startswith(("response", "calls"))] == shown
    assert any(line.split(maxsplit=1)[1:] == ['f({"x": 1})'] for line in map(str.strip, lines))
