"""When a Ray head counts as gone: by a clock that is moved by hand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from bulkrun.executors import head_watch
from bulkrun.executors.head_watch import HeadWatch
from bulkrun.executors.local import DRAIN_S
from tests.waiting import wait_until

RAYS_MINUTE_S = 60  # then Ray ends the process


@contextmanager
def watching(watch: HeadWatch) -> Iterator[HeadWatch]:
    try:
        yield watch
    finally:
        watch.stop()


def test_a_head_without_an_answer_is_silent_in_time_for_the_workers_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with watching(HeadWatch(lambda: None)) as watch:  # asked in five seconds of the real clock
        silent_after = 0
        while not watch.is_silent():
            now, silent_after = now + 1, silent_after + 1
    assert 30 < silent_after < RAYS_MINUTE_S - DRAIN_S - 5


def test_a_question_that_fails_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_watch, "_ASK_EVERY_S", 0.001)
    asked = 0
    answered = threading.Event()

    def ask() -> None:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise RuntimeError("the GCS is restarting")
        answered.set()

    with watching(HeadWatch(ask)) as watch:
        wait_until(answered.is_set, "an answer")
        wait_until(watch._answered.is_set, "that it counts")
        watch._silent_s = 1000.0
        assert not watch.is_silent()
