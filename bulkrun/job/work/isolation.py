"""Finding the row that kills the engine: after a crash, what was in flight runs again in ever smaller groups.

The engine may fail with an exception, or take its process along (`flight` then tells the next process). Eight-way
splits find one bad row among 512 in three more crashes. A generation that crashes alone is the culprit and becomes an
error row; but only once another one has run, because an engine that cannot run anything is not the rows' fault. Rows
that are alike stand together, and so may those that crash: the next one to run is from the other end. Knows no engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from bulkrun.errors import RunError, described
from bulkrun.job.work.shard_work import Generation

_WAYS = 8
# Generations that crashed alone with nothing finished between them: the engine is broken. Where it ran others before,
# they may be the last that are left.
_CULPRITS_IN_A_ROW, _AFTER_OTHERS = 3, 8


def split(suspects: Sequence[Generation], crashed_together: int) -> list[list[Generation]]:
    """The groups in which to run suspects of a crash of `crashed_together` generations."""
    size = -(-crashed_together // _WAYS)
    return [list(suspects[at : at + size]) for at in range(0, len(suspects), size)]


def reason_of(error: Exception) -> str:
    """A line about what broke the engine."""
    return described(error)[:500]


class Isolation:
    """The generations under suspicion, in groups of which only one may run at a time."""

    def __init__(self) -> None:
        self._groups: deque[list[Generation]] = deque()
        self._one_runs = False
        self._unproven: list[tuple[Generation, str]] = []
        self._has_run = False  # whether any generation has

    @property
    def active(self) -> bool:
        """Whether suspects run or wait for their turn."""
        return self._one_runs or bool(self._groups)

    @property
    def undecided(self) -> bool:
        """Whether generations that crashed the engine on their own wait for their conviction."""
        return bool(self._unproven)

    @property
    def has_suspects(self) -> bool:
        """Whether suspects run, wait for their turn or wait for their conviction."""
        return self.active or self.undecided

    def suspect(self, groups: list[list[Generation]]) -> None:
        """Generations that must not run with others, in groups, in the order to run them: before those that wait."""
        self._groups.extendleft(reversed(groups))

    def crashed(self, in_flight: Sequence[Generation], error: Exception) -> None:
        """The engine failed with these in flight. Raises RunError when it fails whatever it is given."""
        if len(in_flight) > 1:
            self.suspect(split(in_flight, len(in_flight)))
            return
        reason = reason_of(error)
        self._unproven += [(generation, reason) for generation in in_flight]
        if not in_flight or len(self._unproven) >= (_AFTER_OTHERS if self._has_run else _CULPRITS_IN_A_ROW):
            raise RunError(
                f"the engine fails on every request ({reason}); no row is to blame. What was finished is saved; "
                "fix the cause, then run the same command again"
            ) from error

    def next_group(self) -> list[Generation]:
        """The suspects to run next, alone; none when those before were the last. Call when those before have ended."""
        take = self._groups.pop if self._unproven else self._groups.popleft
        group = take() if self._groups else []
        self._one_runs = bool(group)
        return group

    def convicted(self) -> list[tuple[Generation, str]]:
        """The generations that crash the engine on their own, with the reason. Call when another one has run."""
        convicted, self._unproven, self._has_run = self._unproven, [], True
        return convicted
