"""`bulkrun init`: its options reach the job file, and it says what to type next, and what to fill in before that."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from bulkrun.job.jobfile.load import load_job


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.csv").write_text("query;document\nread a file;opens it\n")


def init(*options: str) -> Result:
    done = CliRunner().invoke(main, ["init", "pairs.csv", "--delimiter", ";", *options], catch_exceptions=False)
    assert done.stdout == ""
    return done


def test_a_job_without_a_model_is_completed_first() -> None:
    said = init("--task", "classify", "--column", "query", "--column", "document").stderr.splitlines()
    assert said[0].split() == ["wrote", "job.yaml"]
    assert said[1].startswith("next     write the model's name into job.yaml (model:); then bulkrun preview job.yaml")
    job = load_job(Path("job.yaml"), ["model=somewhere"])
    assert (job.prompt.column, job.prompt.text_pair, job.input.delimiter) == ("query", "{{ document }}", ";")


def test_a_job_that_runs_is_run_next() -> None:
    said = init("--task", "embed", "--out", "my job.yaml").stderr
    assert "next     bulkrun preview 'my job.yaml'; then bulkrun submit 'my job.yaml'" in said
    assert load_job(Path("my job.yaml")).task == "embed"


def test_a_backslash_t_is_a_tab_as_no_shell_makes_one() -> None:
    Path("pairs.csv").write_text("query\tdocument\nread a file\topens it\n")
    assert init("--delimiter", r"\t").exit_code == 0
    assert load_job(Path("job.yaml")).input.delimiter == "\t"


def test_a_dash_is_stdout_where_nothing_else_is() -> None:
    done = CliRunner().invoke(main, ["init", "pairs.csv", "--delimiter", ";", "--out", "-"], catch_exceptions=False)
    assert (done.exit_code, done.stderr, Path("-").exists()) == (0, "", False)
    Path("job.yaml").write_text(done.stdout)
    assert load_job(Path("job.yaml")).input.path == "pairs.csv"


def test_what_cannot_be_ends_with_the_reason() -> None:
    refused = init("--column", "documents")
    assert refused.exit_code == 2
    assert refused.stderr == "error: --column: the input has no column 'documents'; did you mean 'document'?\n"


def test_a_delimiter_is_named_as_the_option_that_gives_it() -> None:
    said = CliRunner().invoke(main, ["init", "pairs.csv"]).stderr
    assert said.endswith("""if ';' separates its fields, set --delimiter ";", and --delimiter "," if it does not\n""")
    assert init("--delimiter", "ab").stderr.startswith("error: --delimiter: must be one character")
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    said = CliRunner().invoke(main, ["init", "rows.jsonl", "--delimiter", ";"]).stderr
    assert said == "error: --delimiter: rows.jsonl is jsonl, not CSV; leave it out\n"
