"""Structured output end to end on the bundled model, judged by `jsonschema` and read by DuckDB."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import duckdb
import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from bulkrun.cli import main
from tests.launch.one_process import one_process, own_engine

EXAMPLE = Path(__file__).parents[2] / "jobs" / "extract_json.yaml"
SOURCE = "def read_{i}(path):\n    with open(path) as file:\n        return file.read()[{i}:]\n"


def submit(folder: Path, job: Path, *settings: str) -> int:
    options = [part for setting in settings for part in ("--set", setting)]
    with one_process(own_engine):
        return CliRunner().invoke(main, ["submit", str(job), *options], catch_exceptions=False).exit_code


def results(folder: Path, columns: str) -> list[tuple[Any, ...]]:
    return duckdb.sql(f"SELECT {columns} FROM '{folder}/*.parquet' ORDER BY row").fetchall()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"f{i}", "module": "m", "name": f"read_{i}", "source": SOURCE.format(i=i)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_every_row_of_the_example_fits_its_schema_or_is_flagged_with_its_text(folder: Path) -> None:
    schema = yaml.safe_load(EXAMPLE.read_text())["sampling"]["structured_outputs"]["json"]
    common = ("input.path=rows.jsonl", "input.sql=null", "sampling.temperature=1.0", "sampling.max_tokens=40")
    assert submit(folder, EXAMPLE, *common) == 3
    rows = results(folder / "out/facts", "error_code, response, finish_reason, parsed, parsed.kind, parsed.raises")
    assert len(rows) == 24
    answers = [row for row in rows if row[0] is None]
    for _, response, _, parsed, kind, raises in answers:
        value = json.loads(response)
        jsonschema.Draft202012Validator(schema).validate(value)
        assert parsed == value
        assert (kind, raises) == (value["kind"], value["raises"])
    flagged = [row for row in rows if row[0] is not None]
    for code, response, finish_reason, parsed, _, _ in flagged:
        assert (code, finish_reason, parsed) == ("invalid_schema", "length", None)
        assert response.startswith('{"summary":'), "the text is kept as it was cut"
        with pytest.raises(ValueError, match=r".") as broken:
            json.loads(response)
        assert broken
    assert answers
    assert flagged


JOB = """\
name: rows
model: bundled:tiny
input: {path: rows.jsonl, columns: [name]}
prompt: {template: "Read:\\n{{ source }}"}
sampling: {max_tokens: 24, temperature: 1.0, seed: 3, structured_outputs: {choice: ["yes", "no"]}}
output: {path: out}
"""


def test_rows_with_schemas_of_their_own_keep_to_them_and_a_bad_one_is_its_rows_error(folder: Path) -> None:
    schemas: list[Any] = [
        {"type": "integer", "minimum": 10, "maximum": 99},
        '{"enum": ["red", "green"]}',
        {"type": "strin"},
        {"type": "array", "uniqueItems": True, "items": {"type": "integer"}},
        None,
    ]
    rows = [
        {"name": str(i), "source": "x", "schema": json.dumps(s) if isinstance(s, dict) else s}
        for i, s in enumerate(schemas)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(JOB)
    assert submit(folder, folder / "job.yaml", "sampling.per_row.structured_outputs=schema") == 3
    number, color, broken, unusable, choice = results(folder / "out", "response, parsed, error_code, error_message")
    assert re.fullmatch(r"[1-9][0-9]", number[0])
    assert number[1] == number[0]
    assert color[0] in ('"red"', '"green"')
    assert color[1] == json.loads(color[0])
    assert (broken[0], broken[2]) == (None, "bad_input")
    assert "$.type" in broken[3]
    assert (unusable[0], unusable[2]) == (None, "grammar_failed")
    assert "uniqueItems" in unusable[3]
    assert choice[0] in ("yes", "no")


@pytest.mark.parametrize(
    ("structured", "wanted"),
    [
        ('{regex: "[A-D]"}', "[A-D]"),
        ('{grammar: \'start: "A" | "B"\'}', "[AB]"),
        ("{json: {type: integer, minimum: 1, maximum: 5}}", "[1-5]"),
        ('{choice: [" ", "A"]}', "[ A]"),
    ],
)
def test_an_answer_of_one_token_is_an_answer_when_one_token_is_all_there_may_be(
    folder: Path, structured: str, wanted: str
) -> None:
    (folder / "job.yaml").write_text(JOB)
    settings = ("sampling.max_tokens=1", f"sampling.structured_outputs={structured}")
    assert submit(folder, folder / "job.yaml", *settings) == 0
    for response, finish_reason, code in results(folder / "out", "response, finish_reason, error_code"):
        assert re.fullmatch(wanted, response)
        assert (finish_reason, code) == ("length", None)


def test_a_budget_of_thoughts_holds_and_the_answer_fits(folder: Path) -> None:
    (folder / "job.yaml").write_text(JOB)
    rows = [{"name": str(i), "source": f"{i}<think>\n"} for i in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert submit(folder, folder / "job.yaml", "prompt.chat_template=none", "sampling.thinking={max_tokens: 5}") == 0
    for response, reasoning in results(folder / "out", "response, reasoning"):
        assert response in ("yes", "no")
        assert reasoning is not None


def test_every_row_of_the_classifying_example_has_one_of_the_labels(folder: Path) -> None:
    job = EXAMPLE.with_name("classify.yaml")
    assert submit(folder, job, "input.path=rows.jsonl", "input.sql=null", "sampling.temperature=1.0") == 0
    labels = [response for (response,) in results(folder / "out/labels", "response")]
    assert len(labels) == 24
    assert set(labels) <= {"reads", "writes", "computes"}


def test_lines_of_a_batch_have_structures_of_their_own_and_a_bad_one_fails_alone(folder: Path) -> None:
    own = [
        {"guided_choice": ["reads", "writes"]},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"guided_grammar": 'start: "yes" | "no"'},
        {"guided_json": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
        {"guided_regex": "(unclosed"},
        {},
    ]
    asked = {"messages": [{"role": "user", "content": "Summarize this."}], "max_tokens": 30}
    lines = [
        {"custom_id": f"r{i}", "url": "/v1/chat/completions", "body": {**asked, **one}} for i, one in enumerate(own)
    ]
    (folder / "batch.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    job = {"name": "b", "model": "bundled:tiny", "input": {"path": "batch.jsonl"}, "output": {"path": "out/b"}}
    (folder / "b.yaml").write_text(yaml.safe_dump(job))
    assert submit(folder, folder / "b.yaml") == 3
    rows = results(folder / "out/b", "error_code, response")
    assert [code for code, _ in rows] == [None, None, None, None, "grammar_failed", None]
    texts = [text for _, text in rows]
    assert texts[0] in ("reads", "writes") and re.fullmatch("[0-9]{3}", texts[1]) and texts[2] in ("yes", "no")
    assert json.loads(texts[3]).keys() == {"a"}


def test_a_judge_says_how_sure_it_is_of_each_answer(folder: Path) -> None:
    job = EXAMPLE.with_name("judge.yaml")
    assert submit(folder, job, "input.path=rows.jsonl", "input.sql=null", "output.path=out") == 0
    query = re.search(r'query out/judged "(SELECT .+)"', job.read_text())
    assert query is not None
    sure = dict(duckdb.sql(query[1].replace("results", "'out/*.parquet'")).project("name, p_yes").fetchall())
    judged = results(folder / "out", "name, response, logprobs[1].top")
    assert len(judged) == 24
    for name, response, top in judged:
        chances = {entry["token"]: math.exp(entry["logprob"]) for entry in top}
        assert math.isclose(sum(chances.values()), 1, abs_tol=1e-4) and len(chances) < 10
        yes = sum(chance for token, chance in chances.items() if "yes".startswith(token))
        assert sure[name] == pytest.approx(yes, abs=6e-4)
        assert response.startswith(max(chances, key=chances.__getitem__))
