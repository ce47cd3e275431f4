"""Which requests are refused. Those of the generating engine: `tests/engine/test_stopping.py`."""

from __future__ import annotations

import pytest

from bulkrun.engine.scheduling.refusals import refusal, text_refusal
from bulkrun.request import Request


@pytest.mark.parametrize(
    ("prompt", "code"), [([], "empty_prompt"), ([1] * 9, "too_long"), ([99], "bad_input"), ([1] * 8, None)]
)
def test_what_cannot_be_embedded_is_refused(prompt: list[int], code: str | None) -> None:
    error = text_refusal(Request("a", prompt), max_model_len=8, vocab_size=99)
    assert (error and error.code) == code


def test_a_length_may_be_the_models_own_and_no_key_raises_that() -> None:
    request = Request("a", [1] * 9)
    text = text_refusal(request, max_model_len=8, vocab_size=99)
    prompt = refusal(request, max_model_len=8, vocab_size=99, has_stop_matcher=True, has_constraints=True)
    for error in (text, prompt):
        assert error is not None and "by the model" in error.message and "where the model takes more" in error.message
    assert text is not None and "embed" not in text.message  # it may be one to classify
