"""How the processes of pytest-xdist share the tests (`pytest -n 2`): those of the rooms below go to all; jobs, workers,
commands and campaigns, whose tests kill processes and wait for them, run in one afterwards, with the machine to itself.

A kill that is late because a neighbour computes hits another moment than it was meant for: with such tests beside
others a run in two processes failed by chance.
"""

from __future__ import annotations

from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

_SHARED = tuple(f"tests/{folder}/" for folder in ("data", "engine", "models", "ops", "text"))
_MOST_AT_ONCE = 16  # slow tests lie together: who is given few of them at a time is not left with all


def is_shared(node_id: str) -> bool:
    """Whether this test may run beside others."""
    return node_id.startswith(_SHARED)


def shared_first(items: list[pytest.Item]) -> None:
    """Each half in its order."""
    items.sort(key=lambda item: not is_shared(item.nodeid))


class TwoHalves(LoadScheduling):
    """Expects the tests in the order of `shared_first`."""

    def schedule(self) -> None:
        if self.maxschedchunk is None:
            self.maxschedchunk = _MOST_AT_ONCE
        super().schedule()
        self._begin_second_half()

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        super().check_schedule(node, duration)
        self._begin_second_half()

    def _send_tests(self, node: Any, num: int) -> None:
        super()._send_tests(node, sum(map(self._is_shared, self.pending[:num])))

    def _begin_second_half(self) -> None:
        """When the first one is given away: one process waits for the others to end, and then has all the rest."""
        if not self.pending or any(map(self._is_shared, self.pending)):
            return
        one, *others = self.nodes
        for other in others:
            if not other.shutting_down:
                other.shutdown()
        if not any(self.node2pending[other] for other in others):
            super()._send_tests(one, len(self.pending))
            one.shutdown()

    def _is_shared(self, index: int) -> bool:
        assert self.collection is not None
        return is_shared(self.collection[index])
