"""A worker that knows its end: which rows can still finish, and when it is time to stop and save.

A row's time is guessed from the tokens it may still generate, or the texts that it has, and the seconds that a step
took lately. Rows that cannot finish are left for the next start, which costs nothing; what runs when time is up is
saved in the middle of its output. Knows no engine and no files.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SAVE_S = 10.0  # to journal, sync and say goodbye
_SMOOTHING = 0.05  # of a step in the mean: about the last 20 steps count


class Deadline:
    """Time left until `deadline` (monotonic seconds; None: no end)."""

    def __init__(self, deadline: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline, self._clock = deadline, clock
        self._step_s = 0.0
        self.load_s = 0.0  # that loading the model took last
        self.left_some = False  # whether a row was found that could not finish

    def observe(self, step_s: float) -> None:
        """Note how long a step of the engine took; it gave each running sequence one token."""
        self._step_s += (step_s - self._step_s) * (_SMOOTHING if self._step_s else 1.0)

    @property
    def over(self) -> bool:
        """Whether it is time to stop and save."""
        return self._deadline is not None and self._clock() >= self._deadline - SAVE_S

    def fits(self, steps: float, *, loads: bool = False) -> bool:
        """Whether a row that starts now and takes so many steps, one for each token, would finish in time.

        `loads`: once the model is loaded for it.
        """
        if self._deadline is None:
            return True
        takes = steps * self._step_s + (self.load_s if loads else 0.0)
        fits = self._clock() + takes <= self._deadline - SAVE_S
        self.left_some |= not fits
        return fits
