"""When requests with a time limit run out of it. Knows a clock; what is done about it is the engine's business."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bulkrun.engine.scheduling.sequence import Sequence


class Deadlines:
    """The deadlines of sequences that have been scheduled at least once; `clock` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deadlines: dict[Sequence, float] = {}

    def start(self, seqs: Iterable[Sequence]) -> None:
        """Start the clock of sequences that got a row for the first time."""
        for seq in seqs:
            timeout_s = seq.request.sampling.timeout_s
            if timeout_s is not None and seq not in self._deadlines:
                self._deadlines[seq] = self._clock() + timeout_s

    def expired(self) -> list[Sequence]:
        """The sequences whose time is over."""
        if not self._deadlines:
            return []
        now = self._clock()
        return [seq for seq, deadline in self._deadlines.items() if deadline <= now]

    def keep_only(self, seqs: Iterable[Sequence]) -> None:
        """Forget all sequences but these: the others have ended."""
        left = set(seqs)
        self._deadlines = {seq: deadline for seq, deadline in self._deadlines.items() if seq in left}

    def forget(self, seqs: Iterable[Sequence]) -> None:
        """Forget sequences that ended; those without a limit may be among them."""
        for seq in seqs:
            self._deadlines.pop(seq, None)
