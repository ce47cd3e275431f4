"""OpenAI batch files end to end with the bundled model: the shipped example, every bad line, and the way back."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
from click.testing import CliRunner, Result
from openai.types.chat import ChatCompletion
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion import Completion
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses import Response
from pydantic import TypeAdapter

from bulkrun.cli import main
from tests.job.small_runs import job, make_rows, start
from tests.job.work.test_runner import StopAfter
from tests.launch.one_process import one_process, own_engine

ROOT = Path(__file__).parent.parent.parent
SMALL = ("--set", "engine.dtype=float32", "--set", "engine.max_num_seqs=8")
CODE = "def add(a, b):\n    return a + b"
PROMPT = f"Summarize this Python code in one sentence:\n{CODE}"
HELLO: list[Any] = [{"role": "user", "content": PROMPT}]
KINDS: dict[str, type[ChatCompletion | Completion | Response]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]

# Each bad line of a batch file, and what its error row must say.
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "embeddings": ({"url": "/v1/embeddings"}, "url: '/v1/embeddings' is not served"),
    "get": ({"method": "GET"}, "method: 'GET' is not served; only POST is"),
    "stream": ({"body": {"stream": True}}, "body.stream: True is not supported"),
    "tools": ({"body": {"tools": [{"type": "function"}]}}, "item 0: {'type': 'function'} is not"),
    "n": ({"body": {"n": 2}}, "body.n: 2, but the job makes 1 per line"),
    "image": ({"body": {"messages": IMAGE}}, "a content part of type 'image_url'; only text can be read"),
    "no-messages": ({"body": {"messages": None}}, "body.messages: missing"),
    "logprobs": ({"body": {"logprobs": True}}, "set sampling.logprobs: 0"),
    "hot": ({"body": {"temperature": 1000}}, "temperature: 1000.0 is not between 0 and 100"),
    "format": ({"body": {"response_format": {"type": "xml"}}}, "body.response_format"),
    "unknown": ({"body": {"max_token": 5}}, "did you mean 'max_tokens'?"),
    "token-ids": ({"url": "/v1/completions", "body": {"prompt": [[1], [2]], "messages": None}}, "2 prompts in one"),
    "no-body": ({"body": 5}, "body: 5 is not an object"),
    "no-url": ({"url": None}, "url: null is not served"),
}


def bulkrun(*arguments: str) -> Result:
    """The command; one that runs rows does it in this process."""
    with one_process(own_engine):
        return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def request(custom_id: str, **changes: Any) -> dict[str, Any]:
    """A good chat line with `changes` put in; a body that is an object is merged."""
    body: dict[str, Any] = {"model": "gpt-4o", "messages": HELLO, "max_tokens": 6}
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body} | changes
    return line | {"body": body | changes["body"]} if isinstance(changes.get("body"), dict) else line


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The working directory: the shipped job has run there on its own input."""
    folder = tmp_path_factory.mktemp("batch")
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    shutil.copytree(ROOT / "examples", folder / "examples")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = bulkrun("submit", "jobs/openai_batch.yaml", *SMALL)
        assert result.exit_code == 0, result.output
        yield folder


def test_the_shipped_batch_runs_unchanged_and_comes_back_as_official_types(folder: Path) -> None:
    assert bulkrun("export", "out/openai_batch", "--format", "openai", "-o", "answers.jsonl").exit_code == 0
    asked, answered = read_lines(folder / "examples/openai_batch.jsonl"), read_lines(folder / "answers.jsonl")
    assert [line["custom_id"] for line in answered] == [line["custom_id"] for line in asked]
    for question, answer in zip(asked, answered, strict=True):
        assert (answer["error"], answer["response"]["status_code"]) == (None, 200)
        body = KINDS[question["url"]].model_validate(answer["response"]["body"], strict=True)
        assert body.usage is not None and body.usage.total_tokens > 0
        [limit] = [question["body"][key] for key in LIMITS if key in question["body"]]
        made = body.usage.output_tokens if isinstance(body, Response) else body.usage.completion_tokens
        assert made <= limit
    assert read_lines(folder / "answers.errors.jsonl") == []


def test_what_a_line_sets_is_honoured(folder: Path) -> None:
    asked = {line["custom_id"]: line for line in read_lines(folder / "examples/openai_batch.jsonl")}
    sql = f"SELECT custom_id, response, finish_reason FROM '{folder}/out/openai_batch/*.parquet'"
    answers = {custom_id: (text, reason) for custom_id, text, reason in duckdb.execute(sql).fetchall()}
    assert set(answers) == set(asked)
    assert "." not in answers["one-sentence-to_json"][0]
    assert answers["responses-json-add"] == answers["json-add"], "the same, asked in another way"
    assert set(json.loads(answers["json-add"][0])) == {"pure"}
    assert answers["label-clamp"][0] in ("reads", "writes", "computes")


def test_validate_and_plan_say_what_was_detected(folder: Path) -> None:
    said = "OpenAI batch lines: custom_id, url, body (detected)"
    assert said in bulkrun("validate", "jobs/openai_batch.yaml").stdout
    assert said in bulkrun("plan", "jobs/openai_batch.yaml").stdout
    assert json.loads(bulkrun("plan", "jobs/openai_batch.yaml", "--json").stdout)["prompt"] == said
    shown = json.loads(bulkrun("preview", "jobs/openai_batch.yaml", *SMALL, "-n", "2", "--json").stdout)["rows"]
    assert [row["row_id"] for row in shown] == ["summary-add", "summary-is_even"]


def test_bad_row_of_every_kind_job_ends_each_bad_line_one_error_row(folder: Path) -> None:
    bad = [request(f"bad-{name}", **changes) for name, (changes, _) in BAD.items()]
    lines: list[Any] = [line for each in bad for line in (each, request(f"good-{each['custom_id']}"))]
    write_lines(folder / "mixed.jsonl", [*lines, '{"custom_id": "torn", "method"\n', request("good-bad-embeddings")])
    options = ("--set", "input.path=mixed.jsonl", "--set", "output.path=out/mixed", "--set", "run.max_error_rate=1")
    result = bulkrun("submit", "jobs/openai_batch.yaml", *SMALL, *options)
    assert result.exit_code == 3, result.output
    assert bulkrun("export", "out/mixed", "--format", "openai", "-o", "mixed-out.jsonl").exit_code == 0
    good, errors = read_lines(folder / "mixed-out.jsonl"), read_lines(folder / "mixed-out.errors.jsonl")
    assert len(good) + len(errors) == len(lines) + 2
    assert [line["custom_id"] for line in good] == [f"good-bad-{name}" for name in BAD] + ["good-bad-embeddings"]
    assert [line["custom_id"] for line in errors] == [*(f"bad-{name}" for name in BAD), None]
    for line, (_, words) in zip(errors, BAD.values(), strict=False):
        assert line["error"]["code"] == "bad_input" and words in line["error"]["message"], line
        assert line["response"]["status_code"] == 400
    assert f"mixed.jsonl:{len(lines) + 1}" in errors[-1]["error"]["message"]
    assert {line["response"]["body"]["choices"][0]["message"]["content"] for line in good} == {
        good[0]["response"]["body"]["choices"][0]["message"]["content"]
    }
    report = json.loads(bulkrun("plan", "jobs/openai_batch.yaml", "--set", "input.path=mixed.jsonl", "--json").stdout)
    assert report["duplicate_ids"]["count"] == 1
    assert report["duplicate_ids"]["examples"][0]["id"] == "good-bad-embeddings"


def test_a_file_of_the_official_packages_types_runs_and_raw_text_is_not_templated(folder: Path) -> None:
    chat: ChatParams = {
        "model": "gpt-4o",
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": PROMPT.split("\n")[0]}, {"type": "text", "text": CODE}],
            }
        ],
        "max_completion_tokens": 9,
        "temperature": 0,
        "top_p": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "n": 1,
        "stop": None,
        "seed": 1,
        "response_format": {"type": "text"},
        "logprobs": False,
        "user": "someone",
        "metadata": {"night": "1"},
        "stream": False,
        "tool_choice": "none",
        "service_tier": "auto",
    }
    templated = f"<|im_start|>user\n{PROMPT}<|im_end|>\n<|im_start|>assistant\n"
    raw: CompletionParams = {"model": "gpt-3.5-turbo-instruct", "prompt": templated, "max_tokens": 9, "echo": False}
    TypeAdapter(ChatParams).validate_python(chat)
    TypeAdapter(CompletionParams).validate_python(raw)
    plain: CompletionParams = {"model": "gpt-3.5-turbo-instruct", "prompt": [PROMPT], "max_tokens": 9, "best_of": 1}
    lines = [
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
        {"custom_id": "templated", "method": "POST", "url": "/v1/completions", "body": raw},
        {"custom_id": "plain", "method": "POST", "url": "/v1/completions", "body": plain},
    ]
    write_lines(folder / "typed.jsonl", lines)
    options = ("--set", "input.path=typed.jsonl", "--set", "output.path=out/typed")
    assert bulkrun("submit", "jobs/openai_batch.yaml", *SMALL, *options).exit_code == 0
    result = bulkrun("export", "out/typed", "--format", "openai")
    chatted, by_hand, bare = (json.loads(line)["response"]["body"] for line in result.stdout.splitlines())
    answer = ChatCompletion.model_validate(chatted, strict=True)
    same = Completion.model_validate(by_hand, strict=True)
    assert answer.choices[0].message.content == same.choices[0].text
    assert answer.usage == same.usage
    assert Completion.model_validate(bare, strict=True).usage != same.usage


def test_what_vllm_adds_to_answers_comes_with_them_where_the_job_has_it(folder: Path) -> None:
    """Each answer speaks of the prompt as it ran: cut, where the line asks for that."""
    chat = request("chat", body={"prompt_logprobs": 2, "truncate_prompt_tokens": 21})
    plain = {"prompt": PROMPT, "max_tokens": 6, "truncate_prompt_tokens": 9}
    write_lines(folder / "told.jsonl", [chat, request("plain", url="/v1/completions") | {"body": plain}])
    sampling = ("logprobs=1", "prompt_logprobs=0", "return_token_ids=true")
    options = ("input.path=told.jsonl", "output.path=out/told", *(f"sampling.{each}" for each in sampling))
    told = [word for option in options for word in ("--set", option)]
    assert bulkrun("submit", "jobs/openai_batch.yaml", *SMALL, *told).exit_code == 0
    result = bulkrun("export", "out/told", "--format", "openai")
    of_chat, of_plain = (json.loads(line)["response"]["body"] for line in result.stdout.splitlines())
    for body, beside, length, likeliest in ((of_chat, of_chat, 21, 2), (of_plain, of_plain["choices"][0], 9, 0)):
        first, *others = beside["prompt_logprobs"]
        assert body["usage"]["prompt_tokens"] == len(beside["prompt_token_ids"]) == length
        assert first is None and len(others) == length - 1
        for token_id, entry in zip(beside["prompt_token_ids"][1:], others, strict=True):
            assert str(token_id) in entry and max(likeliest, 1) <= len(entry) <= likeliest + 1
        [choice] = body["choices"]
        ended = choice["finish_reason"] == "stop"  # by a token that is counted, and not among those that are told
        assert len(choice["token_ids"]) == body["usage"]["completion_tokens"] - ended
        assert choice["logprobs"] is not None


@pytest.mark.parametrize(
    ("line", "detected"),
    [
        ({"messages": HELLO, "text": "not this"}, "column 'messages'"),
        ({"prompt": PROMPT, "text": "not this"}, "column 'prompt'"),
        ({"text": PROMPT, "body": {"other": 1}}, "column 'text'"),
    ],
)
def test_plain_columns_run_without_a_mapping(line: dict[str, Any], detected: str, folder: Path) -> None:
    write_lines(folder / "plain.jsonl", [line])
    options = ("--set", "input.path=plain.jsonl")
    assert detected in bulkrun("validate", "jobs/openai_batch.yaml", *options).stdout
    [row] = json.loads(bulkrun("preview", "jobs/openai_batch.yaml", *SMALL, *options, "--json").stdout)["rows"]
    assert CODE in row["prompt"] and "<|im_start|>" in row["prompt"] and row["response"]


def test_columns_that_do_not_tell_stop_the_job_before_any_work(folder: Path) -> None:
    write_lines(folder / "other.jsonl", [{"question": PROMPT}])
    result = bulkrun("validate", "jobs/openai_batch.yaml", "--set", "input.path=other.jsonl")
    assert result.exit_code == 2
    assert "It has: question" in result.stderr and "prompt.column" in result.stderr


def test_partition_columns_and_typed_columns_are_in_the_export(folder: Path) -> None:
    rows = [{"text": PROMPT, "lang": lang, "tags": [lang, "x"]} for lang in ("en", "de", "en", "fr")]
    write_lines(folder / "parted.jsonl", rows)
    options = ["input.path=parted.jsonl", "output.path=out/parted", "output.partition_by=[lang]"]
    assert (
        bulkrun("submit", "jobs/openai_batch.yaml", *SMALL, *(x for o in options for x in ("--set", o))).exit_code == 0
    )
    found = [json.loads(line) for line in bulkrun("export", "out/parted", "--format", "jsonl").stdout.splitlines()]
    assert [(row["row"], row["lang"], row["tags"]) for row in found] == [
        (number, row["lang"], row["tags"]) for number, row in enumerate(rows)
    ]


def test_messages_go_to_stderr_and_data_to_stdout(folder: Path) -> None:
    result = bulkrun("export", "out/openai_batch", "--format", "csv", "--only", "ok")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) >= 14 and result.stdout.startswith("custom_id,")
    assert re.search(r"15 rows", result.stderr)
    assert bulkrun("export", "out/openai_batch", "--format", "csv", "-o", "examples/openai_batch.jsonl").exit_code == 2
    assert bulkrun("export", str(folder), "--format", "csv").exit_code == 1


def test_one_row_is_counted_as_one(tmp_path: Path) -> None:
    start(tmp_path / "run", make_rows(1), job(tmp_path / "run"))
    assert bulkrun("export", str(tmp_path / "run"), "--format", "jsonl").stderr == "1 row\n"


def test_a_run_that_is_not_finished_is_exported_only_where_that_is_asked(tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    start(Path(out), make_rows(40), job(Path(out), max_tokens=60), should_stop=StopAfter(25), shard_rows=20)
    command = ["export", out, "--format", "jsonl", "-o", str(tmp_path / "rows.jsonl")]
    refused = CliRunner().invoke(main, command)
    assert refused.exit_code == 1 and "--partial exports what is committed" in refused.stderr
    partial = CliRunner().invoke(main, [*command, "--partial"])
    assert partial.exit_code == 0 and "is not finished: " in partial.stderr
