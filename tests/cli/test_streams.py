"""Streams that cannot be used as they are: closed, full, or with an encoding that cannot say everything."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.job.small_runs import job, make_rows, start
from tests.job.without_model import without_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("streams") / "out"
    start(out, make_rows(10), job(out))
    return out


def shell(arguments: str, redirection: str = "", **environment: str) -> subprocess.CompletedProcess[bytes]:
    command = f"{sys.executable} -m bulkrun {arguments} {redirection}"
    return subprocess.run(["bash", "-c", command], capture_output=True, env={**os.environ, **environment}, check=False)


@pytest.mark.parametrize(("redirection", "why"), [(">&-", "Bad file"), (">/dev/full", "No space left on device")])
@pytest.mark.parametrize("command", ["status {}", "export {} --format csv", "query {} 'SELECT 1' --csv"])
def test_a_stdout_that_cannot_be_written_is_one_line(run: Path, command: str, redirection: str, why: str) -> None:
    done = shell(command.format(run), redirection)
    assert done.returncode == 1
    assert done.stderr.decode().startswith(f"error: stdout: {why}") and done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "2> >(true)"])
def test_nobody_on_stderr_is_no_matter(run: Path, tmp_path: Path, redirection: str) -> None:
    assert b"completed" in shell(f"status {run}", redirection).stdout
    done = shell(f"export {run} --format csv -o {tmp_path}/x.csv", redirection)  # says so on stderr
    assert done.returncode == 0 and (tmp_path / "x.csv").stat().st_size


@pytest.mark.parametrize("redirection", ["2>/dev/full", "<&- >&- 2>&-"])
def test_a_job_runs_though_nobody_can_hear_of_it(tmp_path: Path, redirection: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    job_file = tmp_path / "job.yaml"
    job_file.write_text(
        f"{{name: a, model: 'bundled:tiny', input: {{path: {tmp_path}/rows.jsonl}}, prompt: {{column: text}}, "
        f"sampling: {{max_tokens: 2}}, output: {{path: {tmp_path}/out}}}}"
    )
    assert shell(f"submit {job_file}", redirection, **without_model()).returncode == 0
    assert b"1 of 1, 0 with errors" in shell(f"status {tmp_path}/out").stdout


@pytest.mark.parametrize(("option", "unbuffered"), [("", ""), ("--csv", ""), ("--json", ""), ("--json", "1")])
def test_a_reader_that_had_enough_ends_the_command_as_the_shell_expects(
    run: Path, option: str, unbuffered: str
) -> None:
    sql = "SELECT repeat('x', 150) FROM range(1000)"  # more than a pipe holds
    piped = '| head -c 1 > /dev/null; echo "${PIPESTATUS[0]}"'
    done = shell(f'query {run} "{sql}" {option}', piped, PYTHONUNBUFFERED=unbuffered)
    assert done.stdout == b"141\n" and done.stderr == b""


def test_what_an_encoding_cannot_say_is_said_in_escapes_or_in_utf8(run: Path) -> None:
    shown = {
        option: shell(f"query {run} \"SELECT 'é日' AS a\" {option}", PYTHONIOENCODING="ascii")
        for option in ("", "--csv", "--json")
    }
    assert {done.returncode for done in shown.values()} == {0}
    assert rb"\xe9\u65e5" in shown[""].stdout
    assert shown["--csv"].stdout.decode() == "a\r\né日\r\n"
    assert json.loads(shown["--json"].stdout)["rows"] == [{"a": "é日"}]
