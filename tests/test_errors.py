"""What becomes of errors that are somebody else's: one line, whatever they say; and the word that was meant."""

from __future__ import annotations

import pytest

from bulkrun.errors import described, did_you_mean, first_line


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


@pytest.mark.parametrize(
    ("word", "question"),
    [("ID", "did you mean 'id'?"), ("lables", "did you mean 'Label'?"), ("SOURCE", ""), ("id2", "did you mean 'id'?")],
)
def test_the_nearest_word_is_found_whatever_its_case(word: str, question: str) -> None:
    assert did_you_mean(word, ["text", "id", "Label"]) == question
