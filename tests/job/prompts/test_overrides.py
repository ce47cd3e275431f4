from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.prompts.overrides import Overrides, RowSampling
from bulkrun.request import RowError

ALL = {"max_tokens": "m", "temperature": "t", "top_k": "k", "stop": "s", "seed": "seed", "min_tokens": "min"}
NONE = dict.fromkeys(ALL.values())


def of_row(**values: Any) -> RowSampling | RowError:
    sampling = SamplingSpec(max_tokens=50, temperature=0, per_row=ALL)
    return Overrides(sampling, list(ALL.values())).of_row({**NONE, **values})


def test_a_row_without_values_has_the_jobs_sampling() -> None:
    assert of_row() == RowSampling(None, 50, True)


def test_values_are_compact_json_and_equal_values_give_equal_text() -> None:
    sampling = of_row(t=1, m=7.0, s=["a", "b"])
    assert isinstance(sampling, RowSampling) and (sampling.max_tokens, sampling.greedy) == (7, False)
    assert sampling.overrides == '{"max_tokens":7,"stop":["a","b"],"temperature":1.0}'
    assert sampling == of_row(s=["a", "b"], m=7, t=1.0) == of_row(m="7", t=" 1", s=["a", "b"])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("m", 0),
        ("m", 2.5),
        ("m", "many"),
        ("m", True),
        ("m", math.inf),
        ("t", -1),
        ("t", math.nan),
        ("t", [1]),
        ("k", -2),
        ("s", ""),
        ("s", ["a", ""]),
        ("s", 5),
        ("min", 51),
    ],
)
def test_a_bad_value_is_bad_input_that_names_column_and_value(column: str, value: Any) -> None:
    error = of_row(**{column: value})
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert repr(column) in error.message
    assert repr(value) in error.message or repr(float(value)) in error.message


def test_a_row_that_asks_for_noise_is_not_greedy_and_one_that_asks_for_none_is() -> None:
    overrides = Overrides(SamplingSpec(temperature=0.7, per_row={"temperature": "t"}), ["t"])
    assert [overrides.of_row({"t": value})[2] for value in (None, 0, 0.5)] == [False, True, False]


def test_overrides_read_back_as_the_engines_parameters() -> None:
    sampling = of_row(m=9, s="END")
    assert isinstance(sampling, RowSampling) and sampling.overrides
    params = SamplingSpec(temperature=0).to_params(json.loads(sampling.overrides))
    assert (params.max_tokens, params.stop) == (9, ("END",))


def test_an_unknown_column_is_found_before_the_run() -> None:
    with pytest.raises(
        JobFileError, match=r"sampling\.per_row\.top_p: the input has no column 'topp'; did you mean 'top_p'"
    ):
        Overrides(SamplingSpec(per_row={"top_p": "topp"}), ["top_p"])


def schema_of_row(value: Any) -> RowSampling | RowError:
    sampling = SamplingSpec(max_tokens=50, temperature=0, per_row={"structured_outputs": "schema"})
    return Overrides(sampling, ["schema"]).of_row({"schema": value})


def test_a_rows_own_schema_may_be_text_or_a_value_and_is_kept_as_text() -> None:
    as_text, as_value = schema_of_row('{"type":"integer"}'), schema_of_row({"type": "integer"})
    assert as_text == as_value
    assert isinstance(as_text, RowSampling)
    assert json.loads(as_text.overrides or "")["structured_outputs"] == '{"type":"integer"}'


@pytest.mark.parametrize("value", ["{", '{"type": "strin"}', 7, "[]", '{"$ref": "http://127.0.0.1:9/x"}', "[" * 10**5])
def test_a_rows_own_schema_that_cannot_be_used_is_that_rows_bad_input(value: Any) -> None:
    error = schema_of_row(value)
    assert isinstance(error, RowError)
    assert error.code == "bad_input"
    assert "column 'schema' (sampling.structured_outputs)" in error.message
    assert len(error.message) < 400
