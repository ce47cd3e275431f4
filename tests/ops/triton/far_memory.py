"""Memory of more numbers than 32 bits count."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from bulkrun.models.host_memory import untouched_zeros


def far_memory(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """NaN on a GPU; zeros on a CPU, which take no memory where nobody writes. Skips the test where there is no room."""
    if device != "cpu":
        return torch.empty(*shape, dtype=dtype, device=device).fill_(math.nan)
    try:
        return untouched_zeros(shape, dtype, huge_pages=False)
    except OSError as error:
        pytest.skip(f"{math.prod(shape) * dtype.itemsize / 2**30:.0f} GiB of addresses: {error}")
