"""Tools in a job file: what goes together, and where an error is said to be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import load_job
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.jobfile.thought_markers import CHANNELS
from bulkrun.job.jobfile.tools import check_tools, offered
from bulkrun.job.prompts.named_columns import named_columns
from bulkrun.request import ToolCalls
from tests.text.tool_templates import TOOLS

JOB = """\
name: tools
model: m
input: {path: docs.parquet}
output: {path: out}
"""
F = "{type: function, function: {name: f}}"
CALLS = "sampling: {tool_calls: {format: hermes}}\n"


def load(folder: Path, more: str) -> JobSpec:
    (folder / "x.yaml").write_text(JOB + more)
    return load_job(folder / "x.yaml", ())


def test_tools_stand_in_the_job_or_in_a_column(tmp_path: Path) -> None:
    spec = load(tmp_path, f"prompt: {{column: text, tools: [{F}]}}\n{CALLS}")
    assert spec.prompt.tools == [{"type": "function", "function": {"name": "f"}}]
    assert spec.sampling.to_params().tool_calls == ToolCalls("hermes")
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec, "as the run's record has it"
    column = load(tmp_path, f"prompt: {{column: text, tools: those}}\n{CALLS}")
    assert named_columns(column) == ["text", "those"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (
            f"prompt: {{column: a, tools: [{F}]}}\nsampling: {{structured_outputs: {{regex: a}}}}\n",
            r"x.yaml:5:.*prompt\.tools: a structured output has no room for calls",
        ),
        (
            f"prompt: {{column: a, tools: [{F}], tool_choice: required}}\nsampling: {{tool_calls: {{format: none}}}}\n",
            r"x.yaml:5:.*prompt\.tool_choice: what has to be called has a form; set sampling\.tool_calls\.format",
        ),
        (f"prompt: {{column: a, tools: {{a: b}}}}\n{CALLS}", r"x.yaml:5:\d+: prompt\.tools"),
        (f"prompt: {{column: a, tools: [{{type: function}}]}}\n{CALLS}", r"x.yaml:5:.*item 0: .* is not {type: fun"),
        (
            f"prompt: {{column: a, tools: [{F}, {{type: function, function: {{name: g, parameters: 5}}}}]}}\n{CALLS}",
            r"x.yaml:5:.*item 1",
        ),
        (f"prompt: {{column: a, tool_choice: required}}\n{CALLS}", r"x.yaml:5:.*no tools to choose from; set prompt.t"),
        (
            f"prompt: {{column: a, tools: [{F}], tool_choice: always}}\n{CALLS}",
            r"x.yaml:5:.*\"always\" is not one of auto, none, required",
        ),
        (
            f"prompt: {{column: a, tools: [{F}], tool_choice: required}}\nsampling: {{ignore_eos: true}}\n",
            r"x.yaml:5:.*an output ends with its calls; leave out sampling\.ignore_eos",
        ),
        (f"prompt: {{column: a, tools: [{F}, {F}]}}\n", r"x.yaml:5:.*item 1: there is another function 'f'"),
        (f"prompt: {{column: a, tools: [{F}], chat_template: none}}\n{CALLS}", r"x.yaml:5:.*no chat template to show"),
        ("sampling: {tool_calls: {format: xml}}\n", r'x.yaml:5:.*"xml" is not one of auto, none, hermes, llama3_json'),
        (
            "sampling: {tool_calls: {}, structured_outputs: {regex: a}}\n",
            r"x.yaml:5:\d+: sampling\.tool_calls: a structured output has no room for calls",
        ),
        (
            "sampling: {tool_calls: {}, per_row: {structured_outputs: a}}\n",
            r"x.yaml:5:\d+: sampling\.tool_calls: a structured output has no room for calls",
        ),
        (f"task: embed\nprompt: {{column: a, tools: [{F}]}}\n", r"x.yaml:6:\d+: prompt\.tools: nothing is called with"),
        ("task: embed\nsampling: {tool_calls: {}}\n", r"x.yaml:6:\d+: sampling\.tool_calls: nothing is sampled with"),
        (
            "prompt: {messages: [{role: user, content: a, tool_calls: []}]}\n",
            r"x.yaml:5:.*only an assistant calls tools, and the role is user",
        ),
        (
            "prompt: {messages: [{role: assistant, content: '', tool_calls: [{name: f}]}]}\n",
            r"x.yaml:5:.*tool_calls: {'name': 'f'} is not {id, type: function",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load(tmp_path, more)
    [line] = caught.value.problems
    assert re.search(said, line), line


def test_what_is_nested_too_deeply_is_no_tool() -> None:
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"properties": deep}
    with pytest.raises(ValueError, match=r"item 0: .* is not"):
        check_tools([{"type": "function", "function": {"name": "f", "parameters": deep}}])


@pytest.mark.parametrize("wrong", ["f", {}, [1], [{"type": "function", "function": {"name": "\ud800"}}], [None]])
def test_what_is_no_list_of_tools_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="is not"):
        check_tools(wrong)


def test_an_offer_is_what_the_prompt_shows_and_what_has_to_be_called() -> None:
    assert offered(TOOLS, "auto") == (TOOLS, None)
    assert offered(TOOLS, "none") == ((), "none")
    named = {"type": "function", "function": {"name": "weather"}}
    weather = {"name": "weather", "parameters": TOOLS[0]["function"]["parameters"]}
    assert offered(TOOLS, named) == (TOOLS, {"functions": [weather], "one": True}), "the prompt shows all"
    required = offered(TOOLS, "required").tool_calls
    assert isinstance(required, dict) and [one["name"] for one in required["functions"]] == ["weather", "now"]


def test_arguments_that_have_to_fit_are_an_object() -> None:
    def offer(schema: dict[str, Any]) -> Any:
        return offered([{"type": "function", "function": {"name": "f", "parameters": schema}}], "required").tool_calls

    said = {"type": "object", "properties": {"x": {}}}
    assert offer({"properties": {"x": {}}})["functions"] == [{"name": "f", "parameters": said}]
    for wrong in ("array", ["object", "null"], 5):
        with pytest.raises(ValueError, match=r"the parameters of 'f' are of type .*; arguments are an object"):
            offer({"type": wrong})


def test_gpt_oss_thinks_up_to_its_answer_where_that_is_no_call() -> None:
    """A grammar binds what comes behind the end of the thoughts: the head of an answer would not fit it."""
    job = {"thinking": {"start": CHANNELS[0], "end": CHANNELS[1]}, "tool_calls": {"format": "harmony"}}
    sampling = SamplingSpec.model_validate(job)
    own: list[dict[str, Any]] = [{}, {"tool_calls": "none"}, {"structured_outputs": "{}"}]
    ends = [params.thinking and params.thinking.end for params in map(sampling.to_params, own)]
    assert ends == ["<|end|>", CHANNELS[1], CHANNELS[1]]
