"""Patience with a store that fails for a time: pauses that grow between tries, and an end of it. Knows no store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

FIRST_PAUSE_S = 1.0


class Patience:
    """That of one request, from now on: pauses double up to `longest_pause_s`, and end after `in_all_s`."""

    def __init__(self, longest_pause_s: float, in_all_s: float = math.inf) -> None:
        self._pause_s, self._longest_pause_s = FIRST_PAUSE_S, longest_pause_s
        self._give_up = time.monotonic() + in_all_s

    @property
    def is_over(self) -> bool:
        """Whether the next pause would be too long a wait in all."""
        return time.monotonic() + self._pause_s > self._give_up

    def pause(self, wait: Callable[[float], object] = time.sleep) -> None:
        """Wait until the next try; `wait` takes seconds, and may end sooner."""
        wait(self._pause_s)
        self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
