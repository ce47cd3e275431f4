"""How often a worker looks around beside its work: about once a second, less often where a look takes long.

With thousands of parts, or on a slow network disk, looking must not take the engine's time, nor the recorder's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

_PAUSE = 20  # times as long as a look took, within bounds
_BUSY_PAUSE_S = (1.0, 60.0)
_WAITING_PAUSE_S = (0.0, 5.0)  # of a worker that waits for what others, or its own recorder, do


class Pace:
    """When the next look is due."""

    def __init__(self) -> None:
        self._began, self._took = -math.inf, 0.0

    def is_due(self, *, busy: bool) -> bool:
        """Whether to look now; `busy`: the engine has work."""
        shortest, longest = _BUSY_PAUSE_S if busy else _WAITING_PAUSE_S
        return time.monotonic() >= self._began + min(max(shortest, _PAUSE * self._took), longest)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around a look: its length decides when the next one is due."""
        began = time.monotonic()
        yield
        self._began, self._took = began, time.monotonic() - began
