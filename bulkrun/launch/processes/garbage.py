"""Python's garbage collector in a process that steps an engine: kept away from what stays until the end.

A full collection looks at every container that is alive, those of torch and all requests in flight, while a step
waits. It takes a third of a second and finds nothing, for requests make no cycles. So what exists once the engine is
loaded is set aside, and the rest is rarely looked at (figures: tests/benchmarks/gc_pauses.py). Only for processes that
are all ours, such as a worker: an application that uses `bulkrun.LLM` may drop what it has built before, and what is
set aside is never freed; how often to collect is its choice too.

Until then nothing is collected: what is imported and loaded stays, and to look at it again and again as it grows is a
tenth of a worker's start.
"""

from __future__ import annotations

import gc
import sys

# Python's defaults, but 1000 instead of 10 middle collections before a full one: no full collection before seven
# million net allocations. Collecting the young less often does not pay: it takes as long in all, and each pause is
# longer.
_THRESHOLDS = (700, 10, 1000)


def spare_heap() -> None:
    """Collect nothing, until `freeze_heap`."""
    gc.disable()


def freeze_heap() -> None:
    """Collect once, then set aside whatever is alive."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    gc.enable()


def end_quietly() -> None:
    """Before the process ends: its binding has Triton write a page of all that is set aside then into the worker's log,
    as leaks. Without Triton the last collection, a third of a second, is spared."""
    if "triton" in sys.modules:
        gc.unfreeze()


def release_garbage() -> None:
    """Collect everything nobody holds any more, including what was set aside: a failed engine and its memory."""
    gc.unfreeze()
    gc.collect()
