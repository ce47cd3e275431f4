"""What the processor can do that tests depend on.

Triton's interpreter multiplies with numpy. In OpenBLAS's products for AVX2, which it also takes for AMD's Zen or where
OPENBLAS_CORETYPE says so, a row's bits depend on its place; in those for AVX-512 they do not.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def has_gpu_driver() -> bool:
    """Whether there is a GPU that torch may see, asked of nothing that is slow to load."""
    return any(Path(path).exists() for path in ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg"))


def has_avx512() -> bool:
    """Whether the processor has AVX-512."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and " avx512f " in cpuinfo.read_text(encoding="utf-8")


def interprets() -> bool:
    """Whether Triton's kernels are interpreted: where they are asked to be, and where there is no GPU, in which case
    tests/conftest.py asks, which imports this module first."""
    return os.environ.get("TRITON_INTERPRET") == "1" or not has_gpu_driver()


needs_even_products = pytest.mark.skipif(
    interprets() and not has_avx512(),
    reason="interpreted: numpy's products depend on a row's place without AVX-512",
)
