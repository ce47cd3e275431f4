"""What outputs must look like, refused before anything runs, and a schema that is a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import load_job
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.result_columns import extra_fields
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.preparation.structured_output import warn_of_channels, with_markers, with_schema

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b"]}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one row of input."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


def spec(**sampling: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "try",
            "model": "bundled:tiny",
            "input": {"path": "rows.jsonl"},
            "sampling": sampling,
            "output": {"path": "out"},
        }
    )


def test_a_schema_file_is_read_into_the_spec_with_its_order(folder: Path) -> None:
    (folder / "schema.json").write_text(json.dumps(SCHEMA))
    prepared = prepare(spec(structured_outputs={"json": "schema.json"})).spec
    assert prepared == prepare(spec(structured_outputs={"json": SCHEMA})).spec
    recorded = JobSpec.model_validate(json.loads(json.dumps(prepared.model_dump(mode="json"))))
    assert recorded == prepared
    [parsed] = extra_fields(recorded)
    assert [field.name for field in parsed.type] == ["b", "a"]


def test_a_schema_file_may_lie_in_the_home_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    (folder / "home").mkdir()
    (folder / "home/schema.json").write_text(json.dumps(SCHEMA))
    prepared = prepare(spec(structured_outputs={"json": "~/schema.json"})).spec
    assert prepared == prepare(spec(structured_outputs={"json": SCHEMA})).spec


def test_a_byte_order_mark_is_no_part_of_a_schema_file(folder: Path) -> None:
    (folder / "schema.json").write_text(json.dumps(SCHEMA), encoding="utf-8-sig")
    structured = with_schema(spec(structured_outputs={"json": "schema.json"})).sampling.structured_outputs
    assert structured is not None and structured.json_schema == SCHEMA


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "schema.json: no such file"),
        ("{", "schema.json: Expecting"),
        ('"text"', "not an object"),
        ('{"type": "strin"}', r"at \$.type"),
        ('{"$ref": "https://127.0.0.1:9/x"}', "which is not in it"),
    ],
)
def test_a_schema_file_that_cannot_be_used_is_refused(folder: Path, content: str | None, said: str) -> None:
    if content is not None:
        (folder / "schema.json").write_text(content)
    with pytest.raises(JobFileError, match=said) as refused:
        prepare(spec(structured_outputs={"json": "schema.json"}))
    assert str(refused.value).startswith("sampling.structured_outputs.json: ")
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("structured", "said"),
    [
        ({"json": {"type": "array", "uniqueItems": True}}, "json: Unimplemented keys"),
        ({"regex": "(ab"}, "regex: .*unclosed group"),
        ({"grammar": "start: nowhere"}, "grammar: .*unknown name"),
    ],
)
def test_an_unusable_structure_is_refused(structured: dict[str, Any], said: str) -> None:
    with pytest.raises(JobFileError, match=rf"sampling.structured_outputs.{said}"):
        prepare(spec(structured_outputs=structured))


def test_markers_of_thoughts_that_the_model_can_write_pass() -> None:
    prepare(spec(thinking={"max_tokens": 10}))


def test_thoughts_of_gpt_oss_are_in_its_channels_unless_the_job_names_markers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def markers(architecture: str, form: str = "none", **thinking: object) -> tuple[str, str]:
        given = spec(thinking=thinking, tool_calls={"format": form})
        named = with_markers(given, architecture).sampling.thinking
        assert named is not None
        return named.to_param()[:2]

    assert markers("Qwen3ForCausalLM") == ("<think>", "</think>")
    start, end = markers("GptOssForCausalLM", max_tokens=5)
    assert start.startswith("<|channel|>analysis") and end.startswith("<|end|><|start|>assistant<|channel|>final")
    assert markers("GptOssForCausalLM", start="<think>") == ("<think>", "</think>")
    for form, begin in (("cohere", "<|START_THINKING|>"), ("gemma4", "<|channel>thought"), ("hermes", "<think>")):
        assert markers("LlamaForCausalLM", form)[0] == begin
    assert with_markers(spec(), "GptOssForCausalLM").sampling.thinking is None
    warn_of_channels(spec(thinking={}), "GptOssForCausalLM")
    warn_of_channels(spec(), "LlamaForCausalLM")
    assert not caplog.records
    warn_of_channels(spec(), "GptOssForCausalLM")
    assert "`sampling: {thinking: {}}` in the job file" in caplog.text


def test_rows_with_their_own_schemas_make_parsed_a_text_column() -> None:
    [parsed] = extra_fields(spec(per_row={"structured_outputs": "schema"}, structured_outputs={"json": SCHEMA}))
    assert str(parsed.type) == "string"


def test_choices_alone_have_no_parsed_column() -> None:
    assert extra_fields(spec(structured_outputs={"choice": ["yes", "no"]})) == ()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("structured_outputs: {json: 5}", "structured_outputs.json: 5 is not"),
        ("structured_outputs: {jsn: {}}", "structured_outputs.jsn: unknown key, did you mean json"),
        ("structured_outputs: {json: {}, regex: a}", "exactly one of json, regex, choice, grammar"),
        ("{structured_outputs: {regex: a}, ignore_eos: true}", "a structured output ends when it is complete"),
    ],
)
def test_mistakes_in_the_job_file_are_named_by_their_key(folder: Path, lines: str, said: str) -> None:
    job = f"name: try\nmodel: bundled:tiny\ninput: {{path: rows.jsonl}}\noutput: {{path: out}}\nsampling:\n  {lines}\n"
    (folder / "job.yaml").write_text(job)
    with pytest.raises(JobFileError, match=said) as refused:
        load_job(folder / "job.yaml")
    assert "job.yaml:" in str(refused.value)


def test_the_order_of_a_schemas_properties_is_part_of_what_a_run_is() -> None:
    turned = {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))}
    assert turned == SCHEMA
    records = [prepare(spec(structured_outputs={"json": schema})).record(None) for schema in (SCHEMA, turned, SCHEMA)]
    assert records[0].plan_hash == records[2].plan_hash
    assert records[0].plan_hash != records[1].plan_hash
