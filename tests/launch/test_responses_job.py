"""Batches of /v1/responses lines by the commands: asked and answered as chats are, and back as Responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types.chat import ChatCompletion
from openai.types.completion import Completion
from openai.types.responses import Response

from tests.launch.whole_jobs import cli
from tests.text.tool_templates import HERMES

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
CODE = "Summarize this Python code in one sentence:\ndef add(a, b):\n    return a + b"
SCHEMA = {"type": "object", "properties": {"of": {"enum": ["red", "green"]}}, "required": ["of"]}
FUNCTION = {"name": "color", "description": "To color.", "parameters": {**SCHEMA, "additionalProperties": False}}
TOOL, FLAT = {"type": "function", "function": FUNCTION}, {"type": "function", **FUNCTION}
ASKED = [{"role": "user", "content": CODE}]
CALLED = {"id": "c1", "type": "function", "function": {"name": "color", "arguments": '{"of": "red"}'}}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"messages": ASKED, "max_tokens": 12}, {"input": CODE, "max_output_tokens": 12}),
    "drawn": (
        {"messages": ASKED, "max_tokens": 6, "logprobs": True, "top_logprobs": 2},
        {"input": ASKED, "max_output_tokens": 6, "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    ),
    "system": (
        {"messages": [{"role": "developer", "content": "Be brief."}, *ASKED], "max_tokens": 8},
        {"instructions": "Be brief.", "input": ASKED, "max_output_tokens": 8},
    ),
    "schema": (
        {"messages": ASKED, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
        {"input": CODE, "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}},
    ),
    "called": (
        {"messages": ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
        {"input": CODE, "tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False},
    ),
    "history": (
        {
            "messages": [
                *ASKED,
                {"role": "assistant", "content": "Let me see.", "tool_calls": [CALLED]},
                {"role": "tool", "tool_call_id": "c1", "content": "done"},
                {"role": "user", "content": [{"type": "text", "text": "And?"}]},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "max_tokens": 8,
        },
        {
            "input": [
                *ASKED,
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                {"type": "function_call", "call_id": "c1", "name": "color", "arguments": '{"of": "red"}'},
                {"type": "function_call_output", "call_id": "c1", "output": "done"},
                {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
            ],
            "tools": [FLAT],
            "max_output_tokens": 8,
        },
    ),
}
BAD = {"searches": {"input": "x", "tools": [{"type": "web_search"}]}, "empty": {"input": [], "max_output_tokens": 1}}


def line(name: str, url: str, body: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


LINES = [
    *(
        line(f"{name}-{kind}", url, body)
        for name, bodies in PAIRS.items()
        for kind, url, body in (("chat", CHAT, bodies[0]), ("response", RESPONSES, bodies[1]))
    ),
    line("raw", COMPLETIONS, {"prompt": "import os\n", "max_tokens": 4}),
    *(line(name, RESPONSES, body) for name, body in BAD.items()),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("hermes.jinja").write_text(HERMES)
    return tmp_path


def write(name: str, lines: list[dict[str, Any]]) -> None:
    Path(name).write_text("".join(json.dumps(each) + "\n" for each in lines))


def job_over(path: str, out: str, **sections: Any) -> str:
    """A job file over batch lines, with calls and thoughts in columns."""
    job = {
        "name": "responses",
        "model": "bundled:tiny",
        "input": {"path": path, "id": "custom_id"},
        "prompt": {"chat_template": "hermes.jinja"},
        "sampling": {"max_tokens": 40, "temperature": 0, "logprobs": 0, "tool_calls": {}},
        "engine": {"dtype": "float32"},
        "run": {"max_error_rate": 1},
        "output": {"path": out},
        **sections,
    }
    Path(f"{out}.json").write_text(json.dumps(job))
    return f"{out}.json"


def rows_of(out: str) -> dict[str, dict[str, Any]]:
    rows = [row for part in Path(out).rglob("*.parquet") for row in pq.ParquetFile(part).read().to_pylist()]
    return {row["custom_id"]: row for row in rows}


def answers_of(out: str, *more: str) -> dict[str, dict[str, Any]]:
    written = cli("export", out, "--format", "openai", "--only", "ok", *more).stdout.split("\n")
    return {each["custom_id"]: each["response"]["body"] for each in map(json.loads, filter(None, written))}


def test_each_line_is_asked_and_answered_as_the_chat_that_says_the_same(folder: Path) -> None:
    write("in.jsonl", LINES)
    job = job_over("in.jsonl", "out")
    assert "OpenAI batch lines" in cli("validate", job).output
    planned = json.loads(cli("plan", job, "--json").stdout)
    assert (planned["rows"], planned["duplicate_prompts"]) == (len(LINES), len(PAIRS))
    shown = json.loads(cli("preview", job, "-n", "2", "--json").stdout)["rows"]
    assert shown[0]["prompt"] == shown[1]["prompt"] and CODE in shown[0]["prompt"]
    cli("submit", job, ends_with=3)
    rows = rows_of("out")
    for name in PAIRS:
        chat, response = rows[f"{name}-chat"], rows[f"{name}-response"]
        assert chat["error_code"] is None, chat
        for key in ("response", "prompt_tokens", "completion_tokens", "finish_reason", "logprobs", "error_code"):
            assert chat[key] == response[key], (name, key)
    assert {name: rows[name]["error_code"] for name in BAD} == {"searches": "bad_input", "empty": "empty_prompt"}
    assert "all is well" in cli("verify", "out").output

    answers = answers_of("out")
    assert list(answers) == [each["custom_id"] for each in LINES if each["custom_id"] not in BAD]
    Completion.model_validate(answers["raw"], strict=True)
    for name in PAIRS:
        chat, response = answers[f"{name}-chat"], answers[f"{name}-response"]
        [choice] = ChatCompletion.model_validate(chat, strict=True).choices
        made = Response.model_validate(response, strict=True)
        assert made.output_text == (choice.message.content or "")
        assert (made.status == "incomplete") is (choice.finish_reason == "length")
        assert made.usage is not None and made.usage.total_tokens == chat["usage"]["total_tokens"]
    assert answers["system-response"]["instructions"] == "Be brief."
    [called] = Response.model_validate(answers["called-response"]).output
    assert called.type == "function_call" and json.loads(called.arguments)["of"] in ("red", "green")
    bad = answers_of("out", "--only", "errors")
    assert {name: body["error"]["code"] for name, body in bad.items()} == {
        "searches": "bad_input",
        "empty": "empty_prompt",
    }


def test_an_answer_goes_on_as_the_input_of_the_next_line(folder: Path) -> None:
    """Its items as they are: what was thought, said and called."""
    first = {"input": CODE, "tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False}
    write("in.jsonl", [line("a", RESPONSES, first), line("b", RESPONSES, {"input": CODE, "max_output_tokens": 60})])
    sampling = {"max_tokens": 80, "temperature": 0, "tool_calls": {}, "thinking": {"max_tokens": 4}}
    cli("submit", job_over("in.jsonl", "out", sampling=sampling))
    made = {name: Response.model_validate(body, strict=True) for name, body in answers_of("out").items()}
    assert [item.type for item in made["a"].output] == ["reasoning", "function_call"]
    assert [item.type for item in made["b"].output] == ["message"]
    [_, call] = answers_of("out")["a"]["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "red it is"}
    lines = [
        line("a", RESPONSES, {"input": [*ASKED, *answers_of("out")["a"]["output"], result]}),
        line(
            "b", RESPONSES, {"input": [*ASKED, *answers_of("out")["b"]["output"], {"role": "user", "content": "And?"}]}
        ),
    ]
    write("next.jsonl", lines)
    shown = json.loads(cli("preview", job_over("next.jsonl", "next"), "-n", "2", "--json").stdout)["rows"]
    assert "<tool_response>\nred it is" in shown[0]["prompt"] and '{"name": "color", "arg' in shown[0]["prompt"]
    assert made["b"].output_text in shown[1]["prompt"] and all(row.get("error_code") is None for row in shown)


def test_a_night_runs_lines_that_ask_for_something_else_alone(folder: Path) -> None:
    bodies = {"same": {"input": CODE}, "told": {"input": CODE, "metadata": {"night": "1"}}, "more": {"input": "x"}}
    night = {"run": {"incremental": True, "max_error_rate": 1}, "sampling": {"max_tokens": 3, "temperature": 0}}
    write("in.jsonl", [line(name, RESPONSES, body) for name, body in bodies.items()])
    cli("submit", job_over("in.jsonl", "out", **night))
    before = rows_of("out")
    bodies["told"]["metadata"], bodies["more"]["max_output_tokens"] = {"night": "2"}, 2
    write("in.jsonl", [line(name, RESPONSES, body) for name, body in {**bodies, "new": {"input": "y"}}.items()])
    assert "rows: 1 new, 1 changed, 0 failed, 2 unchanged" in cli("submit", "out.json").output
    after = rows_of("out")
    assert [name for name in before if before[name]["row_key"] != after[name]["row_key"]] == ["more"]
    assert answers_of("out")["more"]["max_output_tokens"] == 2


def test_parquet_brings_bodies_as_structs_and_the_url_may_be_a_folder(folder: Path) -> None:
    body = {"input": [{"role": "user", "content": CODE, "type": None}], "text": None, "metadata": {"a": "b"}}
    pq.write_table(pa.Table.from_pylist([line("a", RESPONSES, body)]), "in.parquet")
    cli("submit", job_over("in.parquet", "out"))
    assert Response.model_validate(answers_of("out")["a"], strict=True).metadata == {"a": "b"}
    bodies = {CHAT: {"messages": ASKED}, RESPONSES: {"input": CODE, "metadata": {"a": "b"}}}
    write("in.jsonl", [line(url, url, each) for url, each in bodies.items()])
    cli("submit", job_over("in.jsonl", "by", output={"path": "by", "partition_by": ["url"]}))
    answers = answers_of("by")
    assert answers[CHAT]["object"] == "chat.completion" and answers[RESPONSES]["metadata"] == {"a": "b"}
    left = job_over("in.jsonl", "left", input={"path": "in.jsonl", "id": "custom_id", "columns": ["url"]})
    cli("submit", left)
    assert answers_of("left")[RESPONSES]["metadata"] == {}


def test_lines_whose_text_is_not_marked_as_text_come_back_as_what_they_are(folder: Path) -> None:
    asked = [line("a", RESPONSES, {"input": CODE, "metadata": {"a": "b"}}), line("b", COMPLETIONS, {"prompt": CODE})]
    texts = [each | {"body": json.dumps(each["body"])} for each in asked]
    rows = [{name: text.encode() for name, text in each.items()} for each in texts]
    pq.write_table(pa.Table.from_pylist(rows), "in.parquet")
    cli("submit", job_over("in.parquet", "out"))
    answers = answers_of("out")
    assert answers["a"]["metadata"] == {"a": "b"} and answers["b"]["object"] == "text_completion"


def test_init_writes_a_job_that_runs_such_lines(folder: Path) -> None:
    write("in.jsonl", [line("a", RESPONSES, {"input": CODE, "max_output_tokens": 4})])
    cli("init", "in.jsonl", "--out", "job.yaml")
    cli("submit", "job.yaml", "--set", "output.path=out")
    assert rows_of("out")["a"]["error_code"] is None
