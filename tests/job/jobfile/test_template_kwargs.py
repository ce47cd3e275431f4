"""Values for a chat template: what any template can be given, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.template_kwargs import check_template_kwargs


def test_json_values_are_taken_as_they_are() -> None:
    check_template_kwargs(
        {"enable_thinking": False, "effort": "low", "documents": [{"title": "a", "n": 1.5}], "x": None}
    )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], r"\[\] is not a mapping"),
        ({"messages": []}, "messages cannot be set: they are the prompt"),
        ({"tools": []}, r"tools cannot be set: set prompt\.tools"),
        ({"add_generation_prompt": False}, "add_generation_prompt cannot be set: a job's prompts ask"),
        ({"continue_final_message": True}, r"continue_final_message cannot be set: set prompt\.continue_final_message"),
        ({"chat_template": "x"}, r"chat_template cannot be set: set prompt\.chat_template"),
        ({1: "x"}, "1: 'x' is not a JSON value under a name"),
        ({"x": float("nan")}, "'x': nan is not a JSON value"),
        ({"x": {1: 2}}, "'x': {1: 2} is not a JSON value"),
        ({"x": object}, "'x': <class 'object'> is not a JSON value"),
    ],
)
def test_what_no_template_can_be_given_is_refused_by_name(values: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_template_kwargs(values)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"chat_template_kwargs": {"tools": []}}, r"^prompt\.chat_template_kwargs: tools cannot be set"),
        ({"chat_template": "none", "chat_template_kwargs": {"a": 1}}, "no chat template to read them"),
        ({"chat_template_kwargs": 5}, r"prompt\.chat_template_kwargs: 5 is not a section"),
    ],
)
def test_a_job_file_says_where(prompt: dict[str, Any], words: str) -> None:
    with pytest.raises(JobFileError, match=words):
        job_of({"name": "j", "model": "m", "input": {"path": "x"}, "output": {"path": "y"}, "prompt": prompt})
