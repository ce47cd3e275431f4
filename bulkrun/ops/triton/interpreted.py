"""Whether kernels are interpreted, which runs no assembly: what is written in it is there in plain Triton too."""

from __future__ import annotations

import triton
import triton.language as tl

IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
