"""Jobs that a program writes: its own paths, tuples and numbers stand for what a job file would have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of

JOB: dict[str, Any] = {
    "name": "job",
    "model": "bundled:tiny",
    "input": {"path": "in.jsonl", "columns": ["a", "b"]},
    "sampling": {"max_tokens": 3, "temperature": 0.5, "stop": ["x", "y"], "stop_token_ids": [1, 2]},
    "output": {"path": "out/a"},
}
OWN: dict[str, Any] = {
    "name": np.str_("job"),
    "model": "bundled:tiny",
    "input": {"path": Path("in.jsonl"), "columns": ("a", "b")},
    "sampling": {
        "max_tokens": np.int64(3),
        "temperature": np.float32(0.5),
        "stop": ("x", "y"),
        "stop_token_ids": np.array([1, 2]),
    },
    "output": {"path": Path("out") / "a"},
}


def test_values_of_a_program_are_those_of_a_job_file() -> None:
    assert job_of(OWN) == job_of(JOB)


@pytest.mark.parametrize(("stop", "shown"), [({"a"}, "\"{'a'}\" is not text or a list"), ((3,), "3 is not text")])
def test_what_no_job_file_can_hold_is_named(stop: Any, shown: str) -> None:
    with pytest.raises(JobFileError) as refused:
        job_of({**JOB, "sampling": {"stop": stop}})
    assert str(refused.value).startswith("sampling.stop") and shown in str(refused.value)
