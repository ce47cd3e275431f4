"""What becomes of errors that are somebody else's: one line, whatever they say."""

from __future__ import annotations

import pytest

from bulkrun.errors import described, first_line


@pytest.mark.parametrize(
    ("error", "line", "with_type"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device", None),
        (
            RuntimeError("\n CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"),
            "CUDA error: out of memory",
            None,
        ),
        (KeyError(3), "3", None),
        (TimeoutError(), "TimeoutError", "TimeoutError"),
        (MemoryError(" \n"), "MemoryError", "MemoryError"),
    ],
)
def test_an_error_has_a_first_line_even_where_it_says_nothing(
    error: Exception, line: str, with_type: str | None
) -> None:
    assert first_line(error) == line
    assert described(error) == (with_type or f"{type(error).__name__}: {line}")
