"""When a worker that knows its end stops taking rows, and when it stops."""

from __future__ import annotations

from bulkrun.job.work.closing import SAVE_S, Closing


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_an_end_everything_fits_for_ever() -> None:
    closing = Closing(None)
    closing.observe(1e9)
    assert closing.fits(1e9) and not closing.over


def test_rows_that_cannot_finish_are_left_and_short_ones_still_run() -> None:
    clock = Clock()
    closing = Closing(200.0 + SAVE_S, clock)
    assert closing.fits(10**9), "nothing is known of the speed yet"
    for _ in range(50):
        closing.observe(0.5)
    assert closing.fits(200) and not closing.fits(201)
    clock.now = 190.0
    assert closing.fits(20) and not closing.fits(21)
    assert not closing.over
    clock.now = 200.0
    assert closing.over


def test_the_speed_follows_the_last_steps() -> None:
    clock = Clock()
    closing = Closing(1100.0 + SAVE_S, clock)
    closing.observe(10.0)
    for _ in range(200):
        closing.observe(0.1)
    assert closing.fits(9900) and not closing.fits(10_200)
