"""When a worker that knows its end stops taking rows, and when it stops."""

from __future__ import annotations

from bulkrun.job.work.deadline import SAVE_S, Deadline


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_an_end_everything_fits_for_ever() -> None:
    deadline = Deadline(None)
    deadline.observe(1e9)
    assert deadline.fits(1e9) and not deadline.over


def test_rows_that_cannot_finish_are_left_and_short_ones_still_run() -> None:
    clock = Clock()
    deadline = Deadline(200.0 + SAVE_S, clock)
    assert deadline.fits(10**9), "nothing is known of the speed yet"
    for _ in range(50):
        deadline.observe(0.5)
    assert deadline.fits(200) and not deadline.fits(201)
    clock.now = 190.0
    assert deadline.fits(20) and not deadline.fits(21)
    assert not deadline.over
    clock.now = 200.0
    assert deadline.over


def test_rows_of_another_model_wait_for_it_to_load() -> None:
    deadline = Deadline(200.0 + SAVE_S, Clock())
    deadline.observe(0.5)
    deadline.load_s = 40.0
    assert deadline.fits(200) and deadline.fits(120, loads=True) and not deadline.left_some
    assert not deadline.fits(121, loads=True) and deadline.left_some


def test_the_speed_follows_the_last_steps() -> None:
    clock = Clock()
    deadline = Deadline(1100.0 + SAVE_S, clock)
    deadline.observe(10.0)
    for _ in range(200):
        deadline.observe(0.1)
    assert deadline.fits(9900) and not deadline.fits(10_200)
