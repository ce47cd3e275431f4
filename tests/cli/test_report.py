"""`bulkrun report`: tables, JSON, and a page in which nothing that a row says is more than text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulkrun.cli import main
from tests.job.small_runs import Row, job, make_rows, start

HOSTILE = "<script>alert(1)</script> \"' javascript:x \u202e\x1b[31m{{ 7 * 7 }} </td></table>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    out = tmp_path / "out"
    rows = make_rows(30, error_every=0)
    start(out, [*rows, Row(30, HOSTILE, None, error_code="bad_input")], job(out))
    return out


def report(*arguments: object) -> str:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_a_person_sees_rows_lengths_errors_and_workers(run: Path) -> None:
    said = report(run)
    assert "completed_with_errors" in said and "31 of 31, 1 with errors" in said
    for heading in ("How rows ended", "Lengths in tokens", "Errors", "Some of them", "Who worked", "What happened"):
        assert f"\n{heading}" in said


def test_rows_of_several_samples_are_told_as_such(tmp_path: Path) -> None:
    start(tmp_path, make_rows(30, error_every=0), job(tmp_path, n=2))
    status = CliRunner().invoke(main, ["status", str(tmp_path)], catch_exceptions=False).stdout
    assert all("60 of 60 (2 samples of each), 0 with errors" in said for said in (report(tmp_path), status))


def test_programs_get_the_same_as_json(run: Path) -> None:
    found = json.loads(report(run, "--json"))
    assert found["errors"]["counts"] == {"bad_input": 1} and found["status"]["rows_done"] == 31
    assert sum(found["timeline"]["rows"]) == 31 and found["lengths"][0]["rows"] == 30


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_one_file_that_runs_and_fetches_nothing(run: Path, tmp_path: Path) -> None:
    events = run / ".bulkrun" / "events.jsonl"
    events.write_text(events.read_text() + json.dumps({"time": "-", "event": HOSTILE}) + "\n")
    assert report(run, "--html", tmp_path / "report.html") == ""
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    names = {tag for tag, _ in page.tags}
    assert names.isdisjoint({"script", "link", "img", "iframe", "a", "form"})
    attributes = {name for _, attrs in page.tags for name in attrs}
    assert not any(re.match(r"on|src$|href$|style$", name) for name in attributes)
    assert any("default-src 'none'" in (attrs.get("content") or "") for _, attrs in page.tags)
    assert "<script>alert(1)</script>" in page.text and "{{ 7 * 7 }}" in page.text, "shown as it is"
    assert "\u202e" not in text and "\x1b" not in text and "\\u202e\\x1b[31m" in text
    heights = [float(attrs["height"] or 0) for tag, attrs in page.tags if tag == "rect"]
    assert heights and all(0 <= height <= 100 for height in heights) and max(heights) == 100
    assert len(text) < 2**20
    assert json.loads(report(run, "--html", tmp_path / "report.html", "--json"))["model"] == "fake", (
        "one does not hide the other"
    )


def test_a_page_that_cannot_be_written_says_where(run: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["report", str(run), "--html", str(tmp_path / "nowhere" / "r.html")])
    assert result.exit_code == 1 and "nowhere" in result.stderr
