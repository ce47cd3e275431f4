"""Markers of thoughts as a job names them."""

from __future__ import annotations

import pytest

from bulkrun.job.jobfile.thinking import ThinkingSpec
from bulkrun.request import Thinking


@pytest.mark.parametrize(
    ("named", "markers"),
    [
        ({}, ("<think>", "</think>")),
        ({"start": "<think>\n", "end": "\n</think>\n\n"}, ("<think>", "</think>")),
        ({"start": "Here is my plan:", "end": "\n\n"}, ("Here is my plan:", "\n\n")),
    ],
)
def test_white_space_around_a_marker_does_not_count(named: dict[str, str], markers: tuple[str, str]) -> None:
    """A prompt that ends with `<think>` and a line break has begun the thoughts, however the marker is named."""
    assert ThinkingSpec(**named).to_param() == Thinking(*markers)
