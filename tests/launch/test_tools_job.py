"""Whole jobs whose rows bring their own tools: every call is of the row's own and fits, however the tools come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from openai.types.chat import ChatCompletion

import bulkrun
from bulkrun.cli import main
from bulkrun.data.inputs import jsonl
from bulkrun.errors import JobFileError
from tests.launch.one_process import one_process, own_engine
from tests.text.later_tool_templates import COHERE
from tests.text.tool_templates import HARMONY, HERMES, HISTORY


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"To {name}.", "parameters": schema}}


COLOR, SIZE = tool("color", of={"enum": ["red", "green", "blue"]}), tool("size", in_m={"type": "integer", "maximum": 9})
# Forms of models that may think first.
THINKERS = {"harmony", "nemotron_json", "lfm2", "deepseek_v31", "kimi_k2", "minimax_m2", "cohere", "gemma4"}
OF_ROWS = [[COLOR], [SIZE], [COLOR, SIZE], [COLOR]]


def job_over(folder: Path, rows: Any, **sections: Any) -> dict[str, Any]:
    """Rows in JSON lines, or in Parquet where they are a table."""
    if isinstance(rows, pa.Table):
        pq.write_table(rows, folder / "in.parquet")
    else:
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "tools",
        "model": "bundled:tiny",
        "input": {"path": str(folder / ("in.parquet" if isinstance(rows, pa.Table) else "in.jsonl"))},
        "prompt": {"column": "text", "tools": "tools", "tool_choice": "required"},
        "sampling": {"max_tokens": 60, "temperature": 0, "tool_calls": {"format": "hermes", "parallel": False}},
        "engine": {"dtype": "float32"},
        "output": {"path": str(folder / "out")},
        "run": {"max_error_rate": 1},
        **sections,
    }


def rows_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    rows = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return sorted(rows, key=lambda row: int(row["row"]))


def assert_calls_one_of(row: dict[str, Any], tools: list[dict[str, Any]]) -> None:
    assert (row["error_code"], row["finish_reason"], row["response"]) == (None, "tool_calls", None), row
    [call] = row["tool_calls"]
    [wanted] = [tool["function"] for tool in tools if tool["function"]["name"] == call["name"]]
    jsonschema.validate(json.loads(call["arguments"]), wanted["parameters"])


@pytest.mark.parametrize("form", ["jsonl", "json text", "parquet"])
def test_rows_of_one_prompt_call_each_its_own_tools(form: str, tmp_path: Path) -> None:
    """The bundled template shows no tools: what is called makes the difference, and rows must not share an answer."""
    rows: Any = [{"text": "def f(x):", "tools": tools} for tools in OF_ROWS]
    if form == "json text":
        rows = [{**row, "tools": json.dumps(row["tools"])} for row in rows]
    if form == "parquet":
        rows = pa.Table.from_pylist(rows)
    made = rows_of(job_over(tmp_path, rows))
    for row, tools in zip(made, OF_ROWS, strict=True):
        assert_calls_one_of(row, tools)
    assert made[0]["tool_calls"][0]["arguments"] == made[3]["tool_calls"][0]["arguments"]
    assert len({row["tool_calls"][0]["id"] for row in made}) == 4, "ids are those of rows"


@pytest.mark.parametrize(
    "form", ["qwen3_coder", "glm45", "deepseek_v3", "deepseek_v32", "hunyuan_a13b", "functiongemma", *sorted(THINKERS)]
)
@pytest.mark.parametrize("of_job", [True, False])
def test_the_other_forms_call_with_the_types_of_the_tools(form: str, of_job: bool, tmp_path: Path) -> None:
    """Digits are a text where the schema says so, in forms that write texts without quotes."""
    zips = tool(
        "zips", code={"type": "string", "enum": ["123", "true"]}, days={"type": "integer", "minimum": 0, "maximum": 9}
    )
    rows: Any = [{"text": text, "tools": [zips]} for text in ("def f(x):", "class A:")]
    thinking = {"thinking": {"max_tokens": 4}} if form in THINKERS else {}
    job = job_over(
        tmp_path,
        rows,
        prompt={"column": "text", "tools": [zips] if of_job else "tools", "tool_choice": "required"},
        sampling={"max_tokens": 240, "temperature": 0, "tool_calls": {"format": form, "parallel": False}, **thinking},
    )
    for row in rows_of(job):
        assert_calls_one_of(row, [zips])
        assert ("reasoning" in row) is (form in THINKERS)


@pytest.mark.parametrize("template", [HARMONY, COHERE])
def test_gpt_oss_and_command_are_told_by_their_templates_and_think_in_a_column(template: str, tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    prompt = {"messages": "chat", "tools": [COLOR], "chat_template": str(tmp_path / "chat.jinja")}
    rows = [{"chat": HISTORY}, {"chat": HISTORY[:1]}]
    sampling = {"max_tokens": 90, "temperature": 0, "thinking": {"max_tokens": 5}}
    job = job_over(tmp_path, rows, prompt={**prompt, "tool_choice": "required"}, sampling=sampling)
    for row in rows_of(job):
        assert_calls_one_of(row, [COLOR])
    free = job_over(
        tmp_path, rows, prompt=prompt, sampling={"max_tokens": 4, "temperature": 0}, output={"path": f"{tmp_path}/free"}
    )
    made = rows_of(free)
    assert "reasoning" in made[0] and all(row["tool_calls"] is None for row in made), "the format implies thoughts"


def test_a_bad_list_of_tools_is_its_rows_error(tmp_path: Path) -> None:
    wrong: list[Any] = [None, "[", [{"type": "function"}], 5, [tool("f", x={"type": "strin"})], "[]"]
    words = ["tools are: none", "not a JSON list", "item 0", "not a list of tools", "of 'f'", "tools are: none"]
    texts = [tools if isinstance(tools, str) else json.dumps(tools) for tools in [[COLOR], *wrong]]
    made = rows_of(job_over(tmp_path, [{"text": "a", "tools": text} for text in texts]))
    assert_calls_one_of(made[0], [COLOR])
    for row, said in zip(made[1:], words, strict=True):
        assert (row["error_code"], row["response"], row["tool_calls"]) == ("bad_input", None, None)
        assert said in row["error_message"] and "tools" in row["error_message"]


def test_tools_beside_conversations_that_nobody_offers_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As datasets for tuning have them."""
    job = job_over(tmp_path, [{"messages": HISTORY[:1], "tools": [COLOR]}], prompt={}, sampling={"max_tokens": 1})
    rows_of(job)
    [said] = [record.message for record in caplog.records if "column 'tools'" in record.message]
    assert "prompt.tools: tools" in said
    caplog.clear()
    cases: list[Any] = [({"tools": "tools"}, "tools"), ({"column": "text"}, "tools"), ({}, "others")]
    for number, (prompt, column) in enumerate(cases):
        sampling = {"max_tokens": 1, "tool_calls": {"format": "hermes"}}
        row = {"messages": HISTORY[:1], column: [COLOR], "text": "a"}
        rows_of(job_over(tmp_path, [row], prompt=prompt, sampling=sampling, output={"path": f"{tmp_path}/{number}"}))
    assert "no prompt shows" not in caplog.text


IN_MESSAGES = """{% for m in messages %}{{ m.content }}
{%- if m.tools %}<tools>{{ m.tools }}</tools>{% endif %}{% endfor %}"""  # as Phi-4-mini's


@pytest.mark.parametrize("of_job", [True, False])
@pytest.mark.parametrize(("template", "is_said"), [(IN_MESSAGES, True), (HERMES, False), ("{{ messages", None)])
def test_tools_that_the_template_does_not_show_are_said(
    template: str, is_said: bool | None, of_job: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A template that names tools may mean others: those of a message."""
    (tmp_path / "chat.jinja").write_text(template)
    prompt = {"column": "text", "tools": [COLOR] if of_job else "tools", "chat_template": str(tmp_path / "chat.jinja")}
    rows = [{"text": "Hi", "tools": [COLOR]}]
    job = job_over(tmp_path, rows, prompt=prompt, sampling={"max_tokens": 1, "tool_calls": {"format": "hermes"}})
    if is_said is None:
        with pytest.raises(JobFileError, match=r"chat\.jinja"):
            rows_of(job)
    else:
        rows_of(job)
    assert ("does not show tools" in caplog.text) is bool(is_said)


def test_tools_and_histories_reach_the_model_through_the_jobs_template(tmp_path: Path) -> None:
    (tmp_path / "hermes.jinja").write_text(HERMES)
    rows = [{"chat": HISTORY}, {"chat": HISTORY[:1]}, {"chat": [*HISTORY[:1], {"role": "tool", "content": "4"}]}]
    prompt = {"messages": "chat", "tools": [COLOR], "chat_template": str(tmp_path / "hermes.jinja")}
    job = job_over(tmp_path, rows, prompt=prompt, sampling={"max_tokens": 4, "temperature": 0})
    made = rows_of(job)
    assert [(row["error_code"], row["tool_calls"]) for row in made] == [(None, None)] * 3, "the template tells the form"
    left = {
        **job,
        "sampling": {**job["sampling"], "tool_calls": {"format": "none"}},
        "output": {"path": f"{tmp_path}/left"},
    }
    others = rows_of(left)
    assert [row["response"] for row in others] == [row["response"] for row in made] and "tool_calls" not in others[0]
    (tmp_path / "job.json").write_text(json.dumps(job))
    result = CliRunner().invoke(main, ["preview", str(tmp_path / "job.json"), "-n", "1", "--json"])
    assert result.exit_code == 0, result.output
    [shown] = json.loads(result.stdout)["rows"]
    assert (
        '"name": "color"' in shown["prompt"]
        and '<tool_call>\n{"name": "weather", "arguments": {"city": "Zür' in (shown["prompt"])
    )


def test_lines_of_a_batch_come_back_with_calls(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"tools": [COLOR, SIZE], "tool_choice": {"type": "function", "function": {"name": "size"}}},
        {"tools": [COLOR], "tool_choice": "none"},
        {"tools": [COLOR, SIZE], "tool_choice": "required"},
    ]
    said = [{"role": "user", "content": "How large?"}]
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": said, **body}}
        for n, body in enumerate(bodies)
    ]
    job = job_over(tmp_path, lines)
    del job["prompt"]
    made = rows_of(job)
    assert_calls_one_of(made[0], [SIZE])
    assert (made[1]["tool_calls"], made[1]["error_code"]) == (None, None) and made[1]["response"]
    assert_calls_one_of(made[2], [COLOR, SIZE])
    result = CliRunner().invoke(main, ["export", str(tmp_path / "out"), "--format", "openai"])
    answers = [
        ChatCompletion.model_validate(json.loads(line)["response"]["body"])
        for line in result.stdout.split("\n")
        if line
    ]
    [size] = answers[0].choices[0].message.tool_calls or []
    assert size.type == "function" and size.function.name == "size" and answers[0].choices[0].message.content is None
    assert [answer.choices[0].finish_reason for answer in answers[::2]] == ["tool_calls"] * 2


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ({"tools": [COLOR]}, {}, r"sampling\.tool_calls: the chat template writes none of the formats .* set sampling"),
        (
            {"tools": [COLOR], "tool_choice": {"type": "function", "function": {"name": "z"}}},
            None,
            "'z', and the tools",
        ),
        (
            {"tools": [COLOR, tool("f", x={"type": "strin"})], "tool_choice": "required"},
            None,
            r"prompt\.tools: function 'f': ",
        ),
        ({"tools": "nothing"}, None, r"prompt\.tools: .*nothing"),
        ({"chat_template": "none"}, {}, r"sampling\.tool_calls: there is no chat template"),
    ],
)
def test_a_job_that_cannot_call_is_refused_before_it_runs(
    prompt: dict[str, Any], sampling: dict[str, Any] | None, said: str, tmp_path: Path
) -> None:
    job = job_over(tmp_path, [{"text": "a"}], prompt={"column": "text", **prompt})
    if sampling is not None:
        job["sampling"] = {"tool_calls": sampling}
    with pytest.raises(JobFileError, match=said), one_process(own_engine):
        bulkrun.run_job(job)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["objects", "texts"])
@pytest.mark.parametrize("content", [None, "Let me see."])
def test_calls_that_come_late_are_never_left_out_of_a_prompt(
    form: str, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns of an input are declared from its first lines."""
    monkeypatch.setattr(jsonl, "SAMPLE_LINES", 16)
    history: list[Any] = json.loads(json.dumps(HISTORY))
    history[1]["content"] = content
    if form == "texts":
        function = history[1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps(function["arguments"])
    (tmp_path / "hermes.jinja").write_text(HERMES)
    late = [*([{"chat": HISTORY[:1]}] * 40), {"chat": history}, {"chat": [{**HISTORY[0], "tool_calls": []}]}]
    prompt = {"messages": "chat", "chat_template": str(tmp_path / "hermes.jinja")}
    job = job_over(tmp_path, late, prompt=prompt, sampling={"max_tokens": 2, "temperature": 0})
    made = rows_of(job)
    assert [row["error_code"] for row in made] == [*[None] * 40, "bad_input", None]
    assert "'tool_calls', which nothing in the sample" in made[40]["error_message"]
    early = job_over(
        tmp_path, late[::-1], prompt=prompt, sampling=job["sampling"], output={"path": f"{tmp_path}/early"}
    )
    assert [row["error_code"] for row in rows_of(early)] == [None] * 42
