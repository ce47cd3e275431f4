"""Python's garbage collector in a process that steps an engine: kept away from what stays until the end.

A full collection looks at every container that is alive, those of torch and all requests in flight, while a step
waits: a third of a second, and nothing is found, for requests make no cycles. So what is there once the engine is
loaded is set aside, and the rest is looked at seldom (figures: tests/benchmarks/gc_pauses.py). Only for processes that
are all ours, such as a worker: an application that uses `bulkrun.LLM` may drop what it has built before, and what is
set aside is never given back; how often to collect is its choice too.
"""

from __future__ import annotations

import gc

# Python's own but for the last, which is 10 there: a full collection after as many of the middle generation, that is at
# the earliest when seven million containers have come and not gone. Collecting the young less often does not pay: it
# takes as long in all, and each pause is longer.
_THRESHOLDS = (700, 10, 1000)


def settle_garbage() -> None:
    """Collect once, then set aside whatever is alive."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)


def release_garbage() -> None:
    """Collect what nobody holds any more, what was set aside with the rest: an engine that failed, and its memory."""
    gc.unfreeze()
    gc.collect()
