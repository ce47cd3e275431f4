from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.inputs.reader import open_input
from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.prompts.detect import json_text_columns
from bulkrun.job.prompts.overrides import Overrides, RowSampling
from bulkrun.request import RowError
from tests.job.plan.planning import job, write_jsonl

ALL = {"max_tokens": "m", "temperature": "t", "top_k": "k", "stop": "s", "seed": "seed", "min_tokens": "min"}
ALL |= {"ignore_eos": "on", "include_stop_str_in_output": "kept"}
ALL |= {"bad_words": "bad", "allowed_token_ids": "only", "stop_token_ids": "ends", "logit_bias": "bias"}
NONE = dict.fromkeys(ALL.values())


def of_row(**values: Any) -> RowSampling | RowError:
    sampling = SamplingSpec(max_tokens=50, temperature=0, per_row=ALL)
    return Overrides(sampling, list(ALL.values())).of_row({**NONE, **values})


def test_a_row_without_values_has_the_jobs_sampling() -> None:
    assert of_row() == RowSampling(None, 50, True)


def test_an_empty_cell_leaves_the_jobs_value() -> None:
    """How CSV says that there is nothing."""
    assert of_row(t="", m="", s="", seed="") == RowSampling(None, 50, True)
    assert of_row(t="", m="7") == of_row(m=7)


def test_values_are_compact_json_and_equal_values_give_equal_text() -> None:
    sampling = of_row(t=1, m=7.0, s=["a", "b"])
    assert isinstance(sampling, RowSampling) and (sampling.max_tokens, sampling.greedy) == (7, False)
    assert sampling.overrides == '{"max_tokens":7,"stop":["a","b"],"temperature":1.0}'
    assert sampling == of_row(s=["a", "b"], m=7, t=1.0) == of_row(m="7", t=" 1", s=["a", "b"])
    assert sampling == of_row(m="7.0", t="1.0", s=["a", "b"]) == of_row(m=" 7. ", t=1, s=["a", "b"])


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("m", 0),
        ("m", 2.5),
        ("m", Decimal("2.5")),
        ("m", "many"),
        ("m", "2.50"),
        ("m", ".0"),
        ("m", True),
        ("m", math.inf),
        ("t", -1),
        ("t", math.nan),
        ("t", [1]),
        ("k", -2),
        ("s", ["a", ""]),
        ("s", 5),
        ("min", 51),
        ("bad", ["a", ""]),
        ("bad", 5),
        ("only", 5),
        ("only", "5"),
        ("ends", 5),
        ("bias", 5),
        ("bias", [5]),
        ("bias", "5"),
        ("bias", "{"),
        ("bias", {"a": 1}),
        ("on", "yes"),
        ("on", 1),
        ("kept", 0.0),
        ("kept", []),
    ],
)
def test_a_bad_value_is_bad_input_that_names_column_and_value(column: str, value: Any) -> None:
    error = of_row(**{column: value})
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert repr(column) in error.message
    assert repr(value) in error.message or repr(float(value)) in error.message


@pytest.mark.parametrize(
    ("value", "stop"),
    [
        ("file", "file"),
        ('["file","zzz"]', ["file", "zzz"]),
        (' ["a"]', ["a"]),
        ('["[1]"]', ["[1]"]),
        ("[]", []),
        ("[", "["),
        ("[a]", "[a]"),
        ("[" * 10**5, "[" * 10**5),
        ('"quoted"', '"quoted"'),
    ],
)
def test_stop_strings_come_as_a_list_also_where_the_column_is_text(value: str, stop: str | list[str]) -> None:
    sampling = of_row(s=value)
    assert isinstance(sampling, RowSampling)
    assert json.loads(sampling.overrides or "") == {"stop": stop}


@pytest.mark.parametrize(
    ("values", "overrides"),
    [
        ({"bad": "no", "only": [5, 6]}, {"bad_words": "no", "allowed_token_ids": [5, 6]}),
        ({"bad": '["no","never"]', "only": " [5,6]"}, {"bad_words": ["no", "never"], "allowed_token_ids": [5, 6]}),
        ({"bad": []}, {"bad_words": []}),
        ({"only": [5.0, Decimal(6), "7"]}, {"allowed_token_ids": [5, 6, 7]}),
        ({"ends": [7, 5.0]}, {"stop_token_ids": [7, 5]}),
        ({"ends": "[]"}, {"stop_token_ids": []}),
    ],
)
def test_words_and_token_ids_come_as_lists_also_where_the_column_is_text(
    values: dict[str, Any], overrides: dict[str, Any]
) -> None:
    sampling = of_row(**values)
    assert isinstance(sampling, RowSampling)
    assert json.loads(sampling.overrides or "") == overrides


@pytest.mark.parametrize(("value", "flag"), [(True, True), (False, False), ("true", True), (" False ", False)])
def test_true_and_false_come_as_such_and_as_text(value: Any, flag: bool) -> None:
    sampling = of_row(on=value, kept=value)
    assert isinstance(sampling, RowSampling)
    assert json.loads(sampling.overrides or "") == {"ignore_eos": flag, "include_stop_str_in_output": flag}
    params = SamplingSpec(max_tokens=50, ignore_eos=True).to_params(json.loads(sampling.overrides or ""))
    assert params.ignore_eos is flag and params.include_stop_str_in_output is flag


@pytest.mark.parametrize("own", [{"structured_outputs": {"regex": "a"}}, {}])
def test_a_row_whose_output_is_structured_does_not_ignore_its_end(own: dict[str, Any]) -> None:
    sampling = SamplingSpec(per_row=ALL, structured_outputs=None if own else {"regex": "a"})
    error = Overrides(sampling, list(ALL.values())).of_row({**NONE, "on": True}, own)
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert error.message.startswith("column 'on' (sampling.ignore_eos): ignore_eos: a structured output ends when it")
    job = SamplingSpec(ignore_eos=True, per_row={"structured_outputs": "form"})
    assert isinstance(Overrides(job, ["form"]).of_row({"form": {"regex": "a"}}), RowSampling), "of a column it does"


@pytest.mark.parametrize(
    "value",
    [
        {"11": -100, "5": Decimal("2.5"), "7": None},
        [(11, -100.0), (5, 2.5)],
        '{"11": -100, "5": 2.5}',
    ],
)
def test_biases_come_as_objects_maps_and_text(value: Any) -> None:
    sampling = of_row(bias=value)
    assert isinstance(sampling, RowSampling)
    assert sampling.overrides == '{"logit_bias":{"5":2.5,"11":-100.0}}'
    params = SamplingSpec(temperature=0, logit_bias={"6": 1}).to_params(json.loads(sampling.overrides))
    assert params.logit_bias == ((5, 2.5), (11, -100.0))
    error = of_row(bias={"5": 101})
    assert isinstance(error, RowError) and "column 'bias' (sampling.logit_bias): logit_bias: 101.0" in error.message
    none = of_row(bias={})
    assert isinstance(none, RowSampling) and none.overrides == '{"logit_bias":{}}'


@pytest.mark.parametrize(
    ("value", "entry"), [([5, "x"], "'x'"), ([True], "True"), ("[5, 6.5]", "6.5"), ([None], "None")]
)
def test_an_entry_that_is_no_token_id_is_bad_input(value: Any, entry: str) -> None:
    error = of_row(only=value)
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert error.message.startswith(f"column 'only' (sampling.allowed_token_ids): {entry} is not a")


@pytest.mark.parametrize("value", ([], "[]"))
def test_a_row_that_may_have_no_token_is_bad_input(value: Any) -> None:
    error = of_row(only=value)
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert "column 'only' (sampling.allowed_token_ids): allowed_token_ids: an empty list allows" in error.message


@pytest.mark.parametrize("value", ['["a",""]', "[1]", "[null]", '["\\ud800"]'])
def test_a_list_that_holds_no_stop_strings_is_bad_input_also_as_text(value: str) -> None:
    error = of_row(s=value)
    assert isinstance(error, RowError)
    assert error.code == "bad_input"
    assert f"put it in a list: {json.dumps([value])}" in error.message


@pytest.mark.parametrize(
    ("column", "value", "expected"),
    [
        ("t", Decimal("0.7"), 0.7),
        ("t", Decimal("1.00"), 1.0),
        ("m", Decimal(40), 40),
        ("m", Decimal("4E+1"), 40),
        ("seed", Decimal(2**100 + 1), 2**100 + 1),
    ],
)
def test_decimals_are_numbers(column: str, value: Decimal, expected: float) -> None:
    """What DuckDB makes of the literal 0.7 and of sum()."""
    sampling = of_row(**{column: value})
    assert isinstance(sampling, RowSampling)
    assert list(json.loads(sampling.overrides or "").values()) == [expected]


def test_a_value_that_a_row_brings_otherwise_is_not_said_to_be_a_columns() -> None:
    error = Overrides(SamplingSpec(per_row={"top_p": "p"}), ["p"]).of_row({"p": 0.5}, {"top_p": 2.0})
    assert isinstance(error, RowError) and error.message.startswith("this row's sampling values: top_p: 2.0 is not")


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


def test_keys_that_only_other_rows_schemas_have_are_no_part_of_a_schema() -> None:
    """Parquet's structs have all keys of all rows, null where a row has them not."""
    merged = {"type": "object", "properties": {"a": {"type": "integer"}, "b": None}, "required": ["a"], "items": None}
    sampling = schema_of_row(merged)
    assert isinstance(sampling, RowSampling), sampling
    schema = json.loads(json.loads(sampling.overrides or "")["structured_outputs"])
    assert schema == {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_schema_with_a_value_that_json_does_not_have_is_its_rows_bad_input() -> None:
    error = schema_of_row({"type": "integer", "maximum": Decimal(10)})
    assert isinstance(error, RowError)
    assert error.code == "bad_input"


@pytest.mark.parametrize("value", ["{", '{"type": "strin"}', 7, "[]", '{"$ref": "http://127.0.0.1:9/x"}', "[" * 10**5])
def test_a_rows_own_schema_that_cannot_be_used_is_that_rows_bad_input(value: Any) -> None:
    error = schema_of_row(value)
    assert isinstance(error, RowError)
    assert error.code == "bad_input"
    assert "column 'schema' (sampling.structured_outputs)" in error.message
    assert len(error.message) < 400


def test_rows_of_json_lines_keep_the_shapes_that_they_have(tmp_path: Path) -> None:
    """Not merged into one struct, and a string among lists is no mistake."""
    own = [{"type": "object", "properties": {name: {"type": "integer"}}, "required": [name]} for name in "ab" * 10]
    stops: list[Any] = [["x", "y"]] * 19 + ["z"]
    biases: list[Any] = [{str(number): 1.0} for number in range(20)]
    path = write_jsonl(
        tmp_path / "in.jsonl", [{"s": s, "schema": o, "b": b} for s, o, b in zip(stops, own, biases, strict=True)]
    )
    spec = job(path, sampling={"per_row": {"stop": "s", "structured_outputs": "schema", "logit_bias": "b"}})
    with open_input(str(path), kept_as_text=partial(json_text_columns, spec)) as dataset:
        [batch] = dataset.batches()
    overrides = Overrides(spec.sampling, dataset.schema.names)
    sampled = [overrides.of_row(row) for row in batch.rows.to_pylist()]
    read = [json.loads(each.overrides or "") for each in sampled if isinstance(each, RowSampling)]
    assert [values["stop"] for values in read] == stops
    assert [json.loads(values["structured_outputs"]) for values in read] == own
    assert [values["logit_bias"] for values in read] == biases


@pytest.mark.parametrize(
    ("cell", "kept"),
    [
        ({"choice": ["yes", "no"], "regex": None, "json": None}, {"choice": ["yes", "no"]}),
        ('{"regex": "[0-9]{3}"}', {"regex": "[0-9]{3}"}),
        ('{"regex": null, "choice": ["yes", "no"]}', {"choice": ["yes", "no"]}),
        ({"grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"json": {"type": "integer"}}, '{"type": "integer"}'),
        ('{"json": "{}"}', "{}"),
    ],
)
def test_a_cell_may_say_what_the_key_itself_says(cell: Any, kept: Any) -> None:
    sampling = schema_of_row(cell)
    assert isinstance(sampling, RowSampling), sampling
    values = json.loads(sampling.overrides or "")
    assert values == {"structured_outputs": kept}
    bound = SamplingSpec(max_tokens=5).to_params(values).structured_outputs
    assert bound is not None and bound.kind == ("json" if isinstance(kept, str) else next(iter(kept)))


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ({"choice": []}, r"\(sampling.structured_outputs\): choice: .* is not a list of texts, one at least"),
        ('{"regex": 5}', r"\(sampling.structured_outputs\): regex: 5 is not text"),
        ({"choice": ["a"], "regex": "b"}, r"\(sampling.structured_outputs\): .*exactly one of json, regex, choice"),
        ('{"choice": null}', r"\(sampling.structured_outputs\): .*exactly one of json, regex, choice, grammar"),
    ],
)
def test_a_cell_that_says_it_wrongly_is_bad_input(cell: Any, message: str) -> None:
    error = schema_of_row(cell)
    assert isinstance(error, RowError) and error.code == "bad_input"
    assert re.search(message, error.message), error.message
