"""One call of the script: where results and logs go, when it must have ended, and what was brought along."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.gpu.processes import Done, python
from tests.benchmarks.gpu.results import Results


@dataclass(frozen=True, slots=True)
class Session:
    """`end`: on the clock of `time.monotonic`. `vllm`: a folder with bench_vllm.py and, under site/, its wheels."""

    results: Results
    end: float
    is_smoke: bool
    vllm: Path | None

    @property
    def left_s(self) -> float:
        """Seconds until this call must have ended."""
        return self.end - time.monotonic()

    def is_due(self, stage: str, name: str, least_s: float) -> bool:
        """Whether this is still to be measured and can be; a line says so where there is no time."""
        if self.results.has(stage, name):
            return False
        if self.left_s < least_s:
            self.results.add(stage, name, skipped=f"unmeasured: {max(0.0, self.left_s):.0f} s were left")
            return False
        return True

    def python(self, arguments: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> Done:
        """Run this Python, with all that it prints in log.txt beside the results."""
        return python(arguments, limit_s, env, self.results.path.with_name("log.txt"))
