"""How OpenMP's threads wait for each other: a setting that decides the CPU engine's speed. Imports no torch."""

from __future__ import annotations

import os

# Turns of GNU OpenMP's waiting loop, some tens of microseconds: about the pause between two operations of a step.
# Measured on 2 virtual cores with a model of 20 million parameters (tests/benchmarks/LOG.md): threads that sleep at
# once take 2.0 times as long, for each wake-up costs more than a small operation; threads that spin without bound
# take 3 to 20 times as long as soon as the kernel puts two of them on one core.
_SPIN_TURNS = 10_000


def bound_spinning() -> None:
    """Bound the spinning of OpenMP threads, unless the user has said how they wait. Call before torch is loaded."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", str(_SPIN_TURNS))
