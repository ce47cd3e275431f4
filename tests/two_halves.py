"""How the processes of pytest-xdist share the tests (`pytest -n 3`): runs, workers and campaigns, whose tests
kill processes and wait for them, run one after the other in the first process; the rooms below in the others meanwhile.

A kill that is late because a neighbour computes hits another moment than it was meant for. So the others are polite:
they take what the first one and the processes that it starts leave of the machine, which is most of it, as they wait.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from typing import Any

import pytest
from xdist.scheduler import LoadScheduling

_ROOMS = ("cli", "data", "engine", "launch/python_api", "models", "ops", "text")
_ROOMS_OF_JOB = ("jobfile", "outputs", "prompts", "update", "views")
_SHARED = tuple(f"tests/{room}/" for room in (*_ROOMS, *(f"job/{room}" for room in _ROOMS_OF_JOB)))
_LONGEST = "tests/ops/triton/test_compiles.py"  # minutes of one core, for which all others would wait at the end
_MOST_AT_ONCE = 16  # slow tests lie together: who is given few of them at a time is not left with all
_FIRST = "gw0"
_POLITE = 10  # a tenth of what the first one gets where both want all: a test with a clock of its own must not starve


def is_shared(node_id: str) -> bool:
    """Whether this test may run beside others."""
    return node_id.startswith(_SHARED)


def shared_last(items: list[pytest.Item]) -> None:
    """Each half in its order, the second behind its longest tests."""
    items.sort(key=lambda item: (is_shared(item.nodeid), not item.nodeid.startswith(_LONGEST)))


def be_polite() -> None:
    """Have this process, one of pytest-xdist, and all that it starts wait for the first one and what that starts."""
    if os.environ["PYTEST_XDIST_WORKER"] != _FIRST:
        os.nice(_POLITE)


class TwoHalves(LoadScheduling):
    """Expects the tests in the order of `shared_last`."""

    def schedule(self) -> None:
        if self.maxschedchunk is None:
            self.maxschedchunk = _MOST_AT_ONCE
        super().schedule()
        for node in self.nodes if self.collection else []:
            self.check_schedule(node)

    def check_schedule(self, node: Any, duration: float = 0) -> None:
        if self._left_for(node):
            super().check_schedule(node, duration)
        elif not node.shutting_down:
            node.shutdown()

    def _send_tests(self, node: Any, num: int) -> None:
        tests = self._left_for(node)[:num]
        if tests:
            self.pending = [test for test in self.pending if test not in tests]
            self.node2pending[node].extend(tests)
            node.send_runtest_some(tests)
        if not self._left_for(node):
            node.shutdown()  # else it waits for one more before it begins its last

    def _left_for(self, node: Any) -> list[int]:
        """The numbers of the tests that nobody has been given yet and this process may have."""
        assert self.collection is not None
        self.pending.sort()  # those of a process that crashed come back at the end
        if node is min(self.nodes, key=lambda one: int(one.gateway.id.removeprefix("gw"))):
            return self.pending
        return self.pending[bisect_left(self.pending, True, key=lambda test: is_shared(self.collection[test])) :]
