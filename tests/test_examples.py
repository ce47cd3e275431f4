"""Examples and jobs work as they are, and the README's numbers of commands are those of the program."""

from __future__ import annotations

import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from bulkrun import LLM, RequestOutput, SamplingParams
from bulkrun.cli import main
from bulkrun.data.results.schema import output_schema
from bulkrun.job.jobfile.load import load_job

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_job_is_valid(job: Path) -> None:
    assert load_job(job).name == job.stem


def test_the_engine_example_answers_every_prompt() -> None:
    command = [sys.executable, str(ROOT / "examples/engine_from_python.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert sorted(line[0] for line in shown.splitlines()) == ["0", "1", "2"]


def test_the_python_api_example_answers_streams_and_runs_a_job() -> None:
    command = [sys.executable, str(ROOT / "examples/python_api.py")]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in shown[:4]] == ["0", "1", "2", "3"] and shown[3] == "3 the prompt is empty"
    assert shown[-1].startswith("completed: 3 rows")


def test_every_example_query_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "out" / "summaries"
    folder.mkdir(parents=True)
    columns = pa.schema([("module", pa.string()), ("name", pa.string()), ("source", pa.string())])
    pq.write_table(output_schema(columns).empty_table(), folder / "part-00000.parquet")
    statements = duckdb.extract_statements((ROOT / "examples/queries.sql").read_text())
    assert len(statements) >= 4
    for statement in statements:
        duckdb.connect().execute(statement)


def test_the_readmes_python_answers_every_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    about_python = (ROOT / "README.md").read_text().split("From Python,")[1]
    block, shown, *_ = re.findall(r"```(?:python)?\n(.*?)```", about_python, re.DOTALL)
    exec(block, {})
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == len(shown.splitlines()) == 2 and all(answers), answers


def test_the_readme_shows_every_command() -> None:
    shown = set(re.findall(r"`bulkrun ([a-z]+)", (ROOT / "README.md").read_text()))
    assert shown >= set(main.commands)


def test_every_path_and_command_named_in_a_page_exists() -> None:
    for page in (ROOT / "README.md", *(ROOT / "examples").glob("*.md")):
        text = page.read_text()
        for path in re.findall(r"`((?:bulkrun|examples|tests|jobs)/[\w/.]+)`", text):
            assert (ROOT / path).exists(), (page, path)
        for module in re.findall(r"python -m (tests\.[\w.]+)", text):
            assert importlib.util.find_spec(module), (page, module)


def test_what_the_page_for_people_from_vllm_names_is_there() -> None:
    page = (ROOT / "examples/from_vllm.md").read_text()
    here = page.split("|---|---|\n")[1]
    fields = set(re.findall(r"`output\.(\w+)`", here.replace("`output.outputs", "")))
    assert fields and fields <= set(RequestOutput.__dataclass_fields__)
    assert f"{SamplingParams().max_tokens} by default" in here
    assert isinstance(LLM.max_model_len, property)
    for method in (LLM.generate, LLM.chat):
        assert "use_tqdm" in inspect.signature(method).parameters
    assert "chat_template_kwargs" in inspect.signature(LLM.chat).parameters


def test_the_readme_shows_the_shipped_job_without_its_comments() -> None:
    shown = re.search(r"without its comments:\n\n```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None
    shipped = yaml.safe_load((ROOT / "jobs/summarize.yaml").read_text())
    del shipped["input"]["hint"]
    assert yaml.safe_load(shown[1]) == shipped


@pytest.mark.parametrize("job", sorted((ROOT / "jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_a_job_that_suggests_a_model_that_can_think_asks_it_for_a_plain_answer(job: Path) -> None:
    """Reasoning is what `reasoning.yaml` is about; elsewhere thoughts would take up all of max_tokens."""
    if re.search(r"Qwen/Qwen3(?!-Embedding)", job.read_text()) and job.stem != "reasoning":
        assert load_job(job).prompt.chat_template_kwargs == {"enable_thinking": False}
