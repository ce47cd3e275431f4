"""The command line as a whole: help, start-up, how errors end it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import bulkrun
from bulkrun import cli
from bulkrun.cli import main
from bulkrun.errors import BulkrunError, Interrupted, JobFileError, ResumeError
from tests.failing_disk import unreadable

COMMANDS = sorted(main.commands)


def test_the_commands_are_those_that_are_built() -> None:
    jobs = "init submit worker cancel retry validate plan preview schema"
    runs = "status watch report logs errors query export verify compact list"
    assert sorted(f"{jobs} {runs} models doctor bench".split()) == COMMANDS


def test_help_shows_every_command_under_a_topic_and_the_exit_codes() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for name in COMMANDS:
        assert f"\n  {name} " in shown
    assert "75   interrupted and saved" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_says_what_it_does_and_describes_every_option(name: str) -> None:
    command = main.commands[name]
    assert command.help
    assert not command.get_short_help_str(limit=76).endswith("..."), "bulkrun --help cuts it"
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, f"--{parameter.name} of {name} has no help"


def test_a_mistyped_command_is_answered_with_the_nearest_one() -> None:
    result = CliRunner().invoke(main, ["submitt", "x.yaml"])
    assert result.exit_code == 2
    assert "submit" in result.output


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output == f"bulkrun {bulkrun.__version__}\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (JobFileError(["a.yaml:1:1: x", "a.yaml:2:1: y"]), 2, "error: a.yaml:1:1: x\nerror: a.yaml:2:1: y\n"),
        (ResumeError("changed"), 4, "error: changed\n"),
        (ResumeError("one\n\n  ^ two"), 4, "error: one\nerror:   ^ two\n"),
        (Interrupted("saved"), 75, "saved\n"),
    ],
)
def test_an_error_is_said_in_lines_and_ends_with_its_code(
    error: BulkrunError, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("bulkrun.cli.jobs._load", fail)
    result = CliRunner().invoke(main, ["validate", "job.yaml"])
    assert (result.exit_code, result.stderr) == (code, said)
    assert "Traceback" in CliRunner().invoke(main, ["--debug", "validate", "job.yaml"]).stderr


def test_python_m_bulkrun_is_the_same_command() -> None:
    result = subprocess.run([sys.executable, "-m", "bulkrun", "--version"], capture_output=True, text=True)
    assert result.stdout == f"bulkrun {bulkrun.__version__}\n"


def test_a_reader_that_goes_away_is_no_traceback() -> None:
    command = f"{sys.executable} -m bulkrun schema | head -c 20 >/dev/null"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ["query", "out", "SELECT 1", "--csv", "--json"],
        ["logs", "out", "--json", "--follow"],
        ["schema", "run", "--format", "json"],
    ],
)
def test_options_that_do_not_go_together_end_as_every_other_mistake_does(words: list[str]) -> None:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    assert result.output.startswith("error: ") and "Usage" not in result.output


def test_a_colleagues_run_is_said_to_be_private_and_how_to_look_at_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(**_: object) -> None:
        raise PermissionError(13, "Permission denied", "/runs/of ada/.bulkrun/run.json")

    monkeypatch.setattr(cli, "main", refuse)
    monkeypatch.setattr(cli, "drop_stdout", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.run()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("error: /runs/of ada/.bulkrun/run.json: Permission denied; ")
    assert said.endswith("its owner types: chmod -R g+rX '/runs/of ada/.bulkrun'\n")


def test_a_file_that_cannot_be_read_is_named_and_is_not_called_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".bulkrun").mkdir()
    record = unreadable(tmp_path / ".bulkrun" / "run.json")
    monkeypatch.setattr(sys, "argv", ["bulkrun", "status", str(tmp_path)])
    monkeypatch.setattr(cli, "repair_streams", lambda: None)
    monkeypatch.setattr(cli, "drop_stdout", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.run()
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith(f"error: {record}: Input/output error; the disk or network file")


@pytest.mark.parametrize(
    ("command", "function", "asked"),
    [
        (
            ["retry", "--failed", "--code", "timeout", "--set", "a=b", "--discard", "--workers", "3"],
            "retry.retry",
            {"overrides": ("a=b",), "codes": ("timeout",), "begin_anew": True, "workers": 3},
        ),
        (["retry", "--failed"], "retry.retry", {"overrides": (), "codes": (), "begin_anew": False, "workers": None}),
        (["worker", "--workers", "3"], "run.join", {}),
    ],
)
def test_options_reach_what_they_are_for(
    command: list[str], function: str, asked: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(root: Path, *given: object, **options: object) -> None:
        assert (root, options) == (tmp_path, asked) and (asked or given[0] == 3)
        raise BulkrunError("it was asked for")

    monkeypatch.setattr(f"bulkrun.launch.runs.{function}", work)
    assert "it was asked for" in CliRunner().invoke(main, [*command, str(tmp_path)]).stderr
