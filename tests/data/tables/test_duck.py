"""A query that a signal ends has left its connection when the caller hears of it, wherever the signal came."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import wait
from contextlib import closing
from pathlib import Path
from typing import Any

import duckdb
import pytest

from bulkrun.data.tables import duck
from bulkrun.data.tables.duck import interruptible, locked_connection
from tests.signalled import LONG_SELECT, Signalled


@pytest.fixture
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    connection = locked_connection()
    yield connection
    connection.close()  # DuckDB refuses while a call is at work


def test_a_query_may_spill_to_the_folder_it_was_given_and_nowhere_else(tmp_path: Path) -> None:
    for spill in (tmp_path, None):
        with closing(locked_connection(spill=spill)) as connection:
            [(folder,)] = connection.execute("SELECT current_setting('temp_directory')").fetchall()
        assert folder == str(spill or "")


def test_a_signal_while_the_thread_starts_ends_what_it_has_begun(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    start = threading.Thread.start

    def signalled(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(60)
        raise Signalled

    def work() -> None:
        begun.set()
        connection.execute(LONG_SELECT)

    monkeypatch.setattr(threading.Thread, "start", signalled)
    with pytest.raises(Signalled):
        interruptible(connection, work)
    assert connection.execute("SELECT 7").fetchall() == [(7,)]


def test_more_signals_while_a_query_ends_do_not_leave_it_at_work(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of somebody who presses Ctrl-C until the prompt is back."""
    begun, signals = threading.Event(), [1, 2]
    start = threading.Thread.start

    def signalled(thread: threading.Thread) -> None:
        start(thread)
        assert begun.wait(60)
        raise Signalled

    def signalled_again(*given: Any) -> object:
        if signals:
            signals.pop()
            raise Signalled
        return wait(*given)

    def work() -> None:
        begun.set()
        connection.execute(LONG_SELECT)

    monkeypatch.setattr(threading.Thread, "start", signalled)
    monkeypatch.setattr(duck, "wait", signalled_again)
    with pytest.raises(Signalled):
        interruptible(connection, work)
    assert not signals and connection.execute("SELECT 7").fetchall() == [(7,)]


def test_a_signal_before_the_thread_begins_leaves_nothing_to_wait_for(
    connection: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[threading.Thread] = []
    begun: list[bool] = []

    def signalled(thread: threading.Thread) -> None:
        started.append(thread)
        raise Signalled

    with monkeypatch.context() as patched, pytest.raises(Signalled):
        patched.setattr(threading.Thread, "start", signalled)
        interruptible(connection, lambda: begun.append(True))
    started[0].start()  # as a thread that the signal met half started
    started[0].join()
    assert not begun
