"""Prompts that hold the date: a run's is that of its beginning, where it began, whoever goes on with it and when."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bulkrun.job.store import run_record
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from tests.launch.nights import Nights, rows_of, whole

TEMPLATE = "{{ strftime_now('%d %b %Y') }}: {{ messages[0]['content'] }}"


@pytest.fixture
def zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets the time zone of this process."""

    def use(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield use
    monkeypatch.undo()
    time.tzset()


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    monkeypatch.setattr(run_record, "utc_now", lambda: "2026-03-28T23:30:00.000Z")
    return Nights(tmp_path, {"prompt__chat_template": str(tmp_path / "template.jinja")})


def test_a_night_in_another_time_zone_runs_new_rows_alone(nights: Nights, zone: Callable[[str], None]) -> None:
    """cron's is often UTC, a shell's the user's own; with the date every key was another one, and every row ran."""
    zone("UTC")
    nights.write(rows_of(9))
    nights.submit()
    for number, name in enumerate(("Asia/Tokyo", "America/New_York", "Europe/Berlin"), start=10):
        zone(name)
        nights.write(rows_of(number))
        assert nights.submit().worked and nights.ran == 1, name
    whole(nights)


def test_a_run_of_an_earlier_version_keeps_the_date_of_where_it_is(nights: Nights, zone: Callable[[str], None]) -> None:
    zone("Asia/Tokyo")
    nights.write(rows_of(9))
    nights.submit()
    began = read_record(RunDir(nights.out)).began
    document = json.loads(RunDir(nights.out).run_json.read_text())
    assert document.pop("utc_offset_s") == 9 * 3600 and began.day == 29
    RunDir(nights.out).run_json.write_text(json.dumps(document))
    assert read_record(RunDir(nights.out)).began.isoformat() == began.isoformat()
    nights.write(rows_of(10))
    assert nights.submit().worked and nights.ran == 1
