"""A worker's collector leaves alone what is there to stay, and still finds what goes later."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import gc, weakref
from bulkrun.launch.garbage import release_garbage, settle_garbage

class Node:
    def __init__(self):
        self.me = self

full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if phase == "start" and info["generation"] == 2 else None)

kept = [Node() for _ in range(1000)]
engine = Node()  # the first engine, set aside with everything else
gone = weakref.ref(engine)
settle_garbage()
assert gc.get_freeze_count() > 1000
del full[:]

del engine
release_garbage()
assert gone() is None, "an engine that failed is still in memory"
settle_garbage()  # there is another engine now
assert gc.get_freeze_count() > 1000
del full[:]

alive = []
for row in range(100_000):  # requests in flight: containers that come and go, no cycles
    alive.append([row, (row, [row])])
    if len(alive) > 5_000:
        del alive[:2_500]
assert not full, f"{len(full)} full collections in the middle of a run"

late = Node()
gone = weakref.ref(late)
del late
gc.collect()
assert gone() is None
"""


def test_no_full_collection_in_a_run_and_a_failed_engine_goes() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)
