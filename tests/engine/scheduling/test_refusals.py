"""Which requests are refused. Those of the generating engine: `tests/engine/test_stopping.py`."""

from __future__ import annotations

import pytest

from bulkrun.engine.scheduling.refusals import text_refusal
from bulkrun.request import Request


@pytest.mark.parametrize(
    ("prompt", "code"), [([], "empty_prompt"), ([1] * 9, "too_long"), ([99], "bad_input"), ([1] * 8, None)]
)
def test_what_cannot_be_embedded_is_refused(prompt: list[int], code: str | None) -> None:
    error = text_refusal(Request("a", prompt), max_model_len=8, vocab_size=99)
    assert (error and error.code) == code
