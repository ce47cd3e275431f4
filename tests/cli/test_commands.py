"""Every command on a real job with the bundled model: what a user sees, and the exit codes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from tests.launch.one_process import one_process

JOB = """\
name: try
model: bundled:tiny
input: {path: rows.jsonl, id: name}
prompt: {template: "Summarize this Python code in one sentence:\\n{{ source }}"}
sampling: {max_tokens: 8, temperature: 0}
output: {path: out}
engine: {dtype: float32, max_num_seqs: 8}
"""
GOOD = [{"name": f"f{i}", "source": f"def add_{i}(a, b):\n    return a + b + {i % 4}"} for i in range(30)]


def bulkrun(*arguments: str) -> Result:
    """The command; one that runs rows does it in this process, on a fake engine."""
    with one_process():
        return bulkrun_with_processes(*arguments)


def bulkrun_with_processes(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments), catch_exceptions=False)


def as_json(*arguments: str) -> Any:
    result = bulkrun(*arguments, "--json")
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in ./out, made from 30 good rows and 2 bad ones; the working directory for this module."""
    folder = tmp_path_factory.mktemp("job")
    lines = [json.dumps(row) for row in GOOD]
    lines[7:7] = ['{"name": "torn", "source": "def', '{"name": "empty", "source": null}']
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "job.yaml").write_text(JOB)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = bulkrun_with_processes("submit", "job.yaml")
        assert result.exit_code == 3, result.output
        assert "completed_with_errors: 32 rows" in result.stderr
        assert "bulkrun query out" in result.stderr
        assert result.stdout == ""
        yield folder


def test_the_results_are_plain_parquet_with_every_row_once(folder: Path) -> None:
    sql = f"SELECT row, name, response, error_code, error_message FROM '{folder}/out/*.parquet' ORDER BY row"
    rows = duckdb.connect().execute(sql).fetchall()
    assert [row[0] for row in rows] == list(range(32))
    assert [row[0] for row in rows if row[3] is not None] == [7, 8]
    assert "rows.jsonl:8" in rows[7][4]
    assert all(row[2] is not None for row in rows if row[3] is None)
    assert [row[1] for row in rows if row[0] not in (7, 8)] == [row["name"] for row in GOOD]


def test_a_finished_run_is_left_alone(folder: Path) -> None:
    before = sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "out").glob("*.parquet"))
    result = bulkrun("submit", "job.yaml")
    assert result.exit_code == 0
    assert "nothing to do" in result.stderr
    assert before == sorted((path.name, path.stat().st_mtime_ns) for path in (folder / "out").glob("*.parquet"))


def test_quiet_says_nothing_on_success_and_what_failed_otherwise(folder: Path) -> None:
    assert bulkrun("submit", "job.yaml", "--quiet").output == ""
    failed = bulkrun("submit", "job.yaml", "--quiet", "--set", "output.path=quiet", "--set", "run.limit=9")
    assert failed.exit_code == 3 and "2 rows failed with bad_input: bulkrun errors quiet" in failed.stderr
    shutil.rmtree("quiet")


def test_a_changed_job_is_refused_with_the_difference(folder: Path) -> None:
    result = bulkrun("submit", "job.yaml", "--set", "sampling.max_tokens=9")
    assert result.exit_code == 4
    assert "sampling.max_tokens: 8 -> 9" in result.stderr
    assert "--fresh" in result.stderr


def test_a_changed_engine_setting_is_not_a_changed_job(folder: Path) -> None:
    assert bulkrun("submit", "job.yaml", "--set", "engine.max_num_seqs=4").exit_code == 0


def test_status(folder: Path) -> None:
    status = as_json("status", "out")
    assert (status["state"], status["rows_done"], status["error_rows"]) == ("completed_with_errors", 32, 2)
    assert "completed_with_errors" in bulkrun("status", "out").stdout


def test_watch_ends_with_the_runs_state_and_so_does_ctrl_c(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(run: object) -> Iterator[Any]:
        raise KeyboardInterrupt
        yield

    for _ in range(2):
        ended = bulkrun("watch", "out")
        assert ended.exit_code == 0 and "out: completed_with_errors\nnext     bulkrun errors out\n" in ended.stderr
        monkeypatch.setattr("bulkrun.job.views.watch.watch_run", interrupted)


def test_ctrl_c_ends_a_command_that_only_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bulkrun.data.results.query.interruptible", interrupted)
    ended = bulkrun("query", "out", "SELECT 1")
    assert (ended.exit_code, ended.output.strip()) == (130, "")


def test_errors(folder: Path) -> None:
    report = as_json("errors", "out")
    assert sum(report["counts"].values()) == 2
    assert [error["id"] for error in report["examples"]["bad_input"]] == [None, "empty"]
    assert ["row", "id", "code", "message"] in [line.split() for line in bulkrun("errors", "out").stdout.splitlines()]
    assert "rows.jsonl:8" in bulkrun("errors", "out").stdout


def test_query_prints_a_table_json_or_csv_and_refuses_to_write(folder: Path) -> None:
    sql = "SELECT count(*) AS rows, count(error_code) AS errors FROM results"
    whole = {"columns": ["rows", "errors"], "rows": [{"rows": 32, "errors": 2}], "truncated": False}
    assert as_json("query", "out", sql) == whole
    some = as_json("query", "out", "SELECT row FROM results", "--limit", "3")
    assert (len(some["rows"]), some["truncated"]) == (3, True)
    assert not as_json("query", "out", "SELECT row FROM results", "--limit", "32")["truncated"], "these are all"
    assert bulkrun("query", "out", sql, "--csv").stdout.split() == ["rows,errors", "32,2"]
    assert "rows" in bulkrun("query", "out", sql).stdout
    nested = "SELECT {'a': [1, NULL], 'b': 'ü'} AS s, [{'t': DATE '2026-01-02'}] AS l"
    assert '{"a": [1, null], "b": "ü"}' in bulkrun("query", "out", nested).stdout
    assert '[{"t": "2026-01-02"}]' in bulkrun("query", "out", nested).stdout
    fine = "SELECT TIMESTAMP_NS '2020-01-01 00:00:00.123456789' AS t"
    for option in ("--json", "--csv", "--limit=5"):
        assert "00:00:00.123456789" in bulkrun("query", "out", fine, option).stdout, "Python has no such time"
    long = "SELECT repeat('word ', 1000) || 'end' AS text"
    table, full, csv = (bulkrun("query", "out", long, *option).stdout for option in ((), ("--full",), ("--csv",)))
    assert "…" in table and len(table.splitlines()) == 2 + 3
    assert "…" not in full + csv and full.count("word") == csv.count("word") == 1000 and "end" in full
    assert bulkrun("query", "out", "COPY results TO 'stolen.csv'").exit_code == 2
    assert not (folder / "stolen.csv").exists()


def test_a_query_as_json_has_no_nan_and_readable_intervals_and_bytes(folder: Path) -> None:
    odd = "SELECT 'nan'::DOUBLE AS a, INTERVAL 90 MINUTE AS b, '\\xAA'::BLOB AS c"
    line = bulkrun("query", "out", odd, "--json").stdout
    assert json.loads(line, parse_constant=pytest.fail)["rows"] == [{"a": None, "b": "PT5400S", "c": "qg=="}]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("query", "out", "SELECT 1", "--csv", "--json"), "--csv or --json"),
        (("status", "out", "--metrics", "--json"), "--metrics or --json"),
        (("query", "out", "SELECT 1", "--limit", "99999999999999999999"), "not in the range"),
        (
            ("submit", "job.yaml", "--fresh", "--resume-anyway"),
            "--fresh starts from the beginning and --resume-anyway continues",
        ),
        (("submit", "job.yaml", "--full-refresh"), "--full-refresh is for jobs with run.incremental: true"),
        (("submit", "job.yaml", "--wait"), "--wait is only for Slurm"),
        (("submit", "job.yaml", "--wait", "--executor", "ray"), "run.executor ray, submit always waits"),
    ],
)
def test_options_that_do_not_go_together_are_refused(folder: Path, arguments: tuple[str, ...], said: str) -> None:
    result = bulkrun(*arguments)
    assert result.exit_code == 2 and said in result.stderr


def test_only_submit_names_its_own_option_for_running_anew(folder: Path) -> None:
    assert "--fresh runs it again" in bulkrun("submit", "job.yaml").stderr
    said = bulkrun("worker", "out").stderr
    assert "is already finished" in said and "--fresh" not in said


def test_a_finished_run_without_its_results_is_not_left_alone(folder: Path) -> None:
    part = next((folder / "out").glob("part-*.parquet"))
    away = part.rename(folder / "away")
    try:
        for command in (("submit", "job.yaml"), ("worker", "out")):
            result = bulkrun(*command)
            assert result.exit_code == 1 and "_SUCCESS says 32 rows, the parts hold" in result.stderr
    finally:
        away.rename(part)


def test_the_settings_of_a_command_are_in_the_next_one(folder: Path) -> None:
    place = "output.path=other out"
    assert bulkrun("submit", "job.yaml", "--set", place, "--set", "run.limit=2", "--workers", "1").exit_code == 0
    (folder / "other out/_SUCCESS").unlink()
    said = as_json("status", "other out")["next_command"]
    assert said == "bulkrun submit job.yaml --set 'output.path=other out' --set run.limit=2 --set run.workers=1"
    said = bulkrun("submit", "job.yaml", "--set", place, "--set", "run.limit=2").stderr
    assert "results  'other out'/*.parquet" in said and "bulkrun query 'other out' " in said
    shutil.rmtree(folder / "other out")


def test_list_shows_a_damaged_run_beside_the_others(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "x/.bulkrun").mkdir(parents=True)
    (tmp_path / "x/.bulkrun/run.json").write_text("{")
    shown = bulkrun("list", str(tmp_path))
    assert shown.exit_code == 0 and "damaged" in shown.stdout and "not a whole JSON file" in shown.stderr


def test_totals_of_a_newer_version_are_named_as_such_and_the_other_runs_are_listed(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "out", tmp_path / "ours")
    shutil.copytree(folder / "out", tmp_path / "newer")
    totals = json.loads((tmp_path / "newer/_SUCCESS").read_text())
    (tmp_path / "newer/_SUCCESS").write_text(json.dumps({**totals, "colour": "red"}))
    failed = bulkrun("status", str(tmp_path / "newer"))
    assert failed.exit_code == 1 and "newer/_SUCCESS: not totals of this bulkrun" in failed.stderr
    assert "'colour'); it was written by a newer bulkrun (use that version)" in failed.stderr
    runs = json.loads(bulkrun("list", str(tmp_path), "--json").stdout)["runs"]
    assert sorted((Path(run["root"]).name, run["state"]) for run in runs) == [
        ("newer", "damaged"),
        ("ours", "completed_with_errors"),
    ]


def test_a_csv_cell_is_never_a_formula(folder: Path) -> None:
    assert "'=1+1" in bulkrun("query", "out", "SELECT '=1+1' AS cell", "--csv").stdout


def test_a_run_of_no_rows_is_queried_and_exported_like_any_other(tmp_path: Path) -> None:
    none, run = pa.array([], pa.string()), str(tmp_path / "out")
    pq.write_table(pa.table({"name": none, "source": none}), tmp_path / "none.parquet")
    (tmp_path / "job.yaml").write_text(
        JOB.replace("rows.jsonl", f"{tmp_path}/none.parquet").replace("path: out", f"path: {run}")
    )
    assert bulkrun("submit", f"{tmp_path}/job.yaml", "--set", "sampling.logprobs=1").exit_code == 0
    found = as_json("query", run, "SELECT * FROM results LIMIT 5")
    assert found["rows"] == [] and {"row", "response", "error_code", "logprobs"} <= set(found["columns"])
    assert bulkrun("export", run, "--format", "csv").stdout.strip().split(",") == found["columns"]
    assert bulkrun("verify", run).exit_code == 0


def test_verify_finds_a_flipped_byte(folder: Path, tmp_path: Path) -> None:
    assert as_json("verify", "out")["problems"] == []
    part = next((folder / "out").glob("part-*.parquet"))
    whole = part.read_bytes()
    try:
        part.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
        result = bulkrun("verify", "out")
        assert result.exit_code == 1
        assert part.name in result.stdout
    finally:
        part.write_bytes(whole)


def test_list_finds_the_run(folder: Path) -> None:
    [run] = as_json("list")["runs"]
    assert run["state"] == "completed_with_errors"
    minute = f"{run['created'][:16].replace('T', ' ')}Z"
    assert run["created"].endswith("Z") and minute in bulkrun("list").stdout


def test_validate_reports_every_problem_with_its_place(folder: Path) -> None:
    assert bulkrun("validate", "job.yaml").exit_code == 0
    broken = folder / "broken.yaml"
    broken.write_text(JOB.replace("max_tokens: 8", "max_tokns: 8").replace("dtype: float32", "dtype: int4"))
    result = bulkrun("validate", "broken.yaml")
    assert result.exit_code == 2
    assert "broken.yaml:5:" in result.stderr
    assert "max_tokens" in result.stderr
    assert "broken.yaml:7:" in result.stderr


def test_validate_finds_weights_that_cannot_be_loaded(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(BUNDLED_ROOT / "tiny", tmp_path / "pickled", ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "pickled" / "pytorch_model.bin").touch()
    model = ("--set", f"model={tmp_path / 'pickled'}", "--set", "output.path=elsewhere")
    refused = bulkrun("validate", "job.yaml", *model)
    assert refused.exit_code == 1 and "weights only as pickle (pytorch_model.bin)" in refused.stderr
    assert bulkrun("validate", "job.yaml", *model, "--set", "engine.load_format=dummy").exit_code == 0


def test_validate_finds_a_priority_column_that_is_not_there(folder: Path) -> None:
    result = bulkrun("validate", "job.yaml", "--set", "input.priority=urgency")
    assert result.exit_code == 2
    assert "input.priority: no column 'urgency'" in result.stderr


@pytest.mark.parametrize("command", ["validate", "plan", "preview", "submit"])
def test_an_id_column_that_is_not_there_is_said_with_the_nearest_one(folder: Path, command: str) -> None:
    result = bulkrun(command, "job.yaml", "--set", "input.id=nmae", "--set", "output.path=misspelled")
    assert result.exit_code == 2
    assert "input.id: the input has no column 'nmae'; did you mean 'name'?" in result.stderr
    assert not (folder / "misspelled/_SUCCESS").exists()


def test_an_id_column_that_cannot_name_rows_is_found_before_the_first_row(folder: Path) -> None:
    (folder / "lists.jsonl").write_text('{"id": [1], "source": "x"}\n')
    result = bulkrun("validate", "job.yaml", "--set", "input.path=lists.jsonl", "--set", "input.id=id")
    assert result.exit_code == 2
    assert "input.id: column 'id' is list<" in result.stderr


def test_a_missing_input_says_how_to_make_it(folder: Path) -> None:
    result = bulkrun("submit", "job.yaml", "--set", "input.path=none.jsonl", "--set", "input.hint=make rows")
    assert result.exit_code == 2
    assert "none.jsonl" in result.stderr
    assert "make rows" in result.stderr


def test_an_unknown_model_says_what_was_tried(folder: Path) -> None:
    result = bulkrun("submit", "job.yaml", "--set", "model=bundled:huge", "--set", "output.path=other")
    assert result.exit_code == 1
    assert "bundled:tiny" in result.stderr
    assert not (folder / "other").exists()


@pytest.mark.parametrize("command", ["validate", "plan", "preview", "submit"])
def test_an_incremental_job_whose_id_is_named_like_a_result_is_refused_by_every_command(
    folder: Path, command: str
) -> None:
    (folder / "answered.jsonl").write_text('{"response": "r1", "text": "x"}\n')
    job = "name: n\nmodel: bundled:tiny\ninput: {path: answered.jsonl, id: response, columns: [text]}\n"
    (folder / "nightly.yaml").write_text(job + "output: {path: nightly}\nrun: {incremental: true}\n")
    result = bulkrun(command, "nightly.yaml")
    assert result.exit_code == 2
    assert "input.id: 'response' is a result column's name" in result.stderr


def test_preview_refuses_the_rows_that_a_night_refuses(folder: Path) -> None:
    (folder / "nameless.jsonl").write_text('{"id": null, "text": "x"}\n{"id": "b", "text": "y"}\n')
    job = "name: n\nmodel: bundled:tiny\ninput: {path: nameless.jsonl, id: id}\nsampling: {max_tokens: 2}\n"
    (folder / "nameless.yaml").write_text(job + "output: {path: nameless}\nrun: {incremental: true}\n")
    first, second = as_json("preview", "nameless.yaml")["rows"]
    assert "run.incremental needs an id in every row" in first["ended_by"]
    assert (second["row_id"], second["ended_by"]) == ("b", "length")


def test_preview_shows_no_row_beyond_the_jobs_limit(folder: Path) -> None:
    rows = as_json("preview", "job.yaml", "-n", "3", "--set", "run.limit=2")["rows"]
    assert [row["row_id"] for row in rows] == ["f0", "f1"]


def test_plan_shows_the_numbers_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    report = as_json("plan", "job.yaml", "--set", "output.path=planned")
    assert (report["rows"], report["duplicate_prompts"]) == (32, 0)
    shown = bulkrun("plan", "job.yaml").stdout
    assert "prompt tokens" in shown and "in 1 window\n" in shown
    memory = report["memory"]
    assert memory["weight_bytes"] == (BUNDLED_ROOT / "tiny" / "model.safetensors").stat().st_size
    assert memory["kv_bytes_per_row"] % memory["kv_bytes_per_token"] == 0 < memory["kv_bytes_per_token"]
    assert "as stored; keys and values in " in shown and " a token, at most " in shown
    assert before == sorted(folder.rglob("*"))


def test_a_probe_of_no_number_of_seconds_is_refused(folder: Path) -> None:
    result = bulkrun("plan", "job.yaml", "--probe", "nan")
    assert (result.exit_code, result.stderr) == (2, "error: --probe nan: not a number of seconds\n")


def test_plan_tells_of_no_memory_where_no_row_runs(folder: Path) -> None:
    (folder / "bad.jsonl").write_text('{"name": "empty", "source": null}\n')
    shown = bulkrun("plan", "job.yaml", "--set", "input.path=bad.jsonl", "--set", "output.path=planned").stdout
    assert "error rows         bad_input 1\n" in shown and "memory" not in shown


def test_preview_shows_prompt_and_response_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*"))
    shown = as_json("preview", "job.yaml", "-n", "8")["rows"]
    expected = (
        duckdb.connect().execute(f"SELECT response FROM '{folder}/out/*.parquet' ORDER BY row LIMIT 8").fetchall()
    )
    assert [row["response"] for row in shown] == [response for (response,) in expected]
    assert "def add_0" in shown[0]["prompt"]
    assert shown[7]["ended_by"].startswith("bad_input")
    assert before == sorted(folder.rglob("*"))


def test_schema_describes_the_job_file() -> None:
    assert set(json.loads(bulkrun("schema").stdout)["properties"]) >= {"input", "prompt", "sampling"}


def test_schema_shows_people_a_section_as_a_table() -> None:
    lines = bulkrun("schema", "sampling.thinking").stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("sampling")] == [
        "sampling.thinking",
        *(f"sampling.thinking.{name}" for name in ("start", "end", "max_tokens")),
    ]
    shown = bulkrun("schema", "--format", "md").stdout.splitlines()
    assert shown[0] == "| key | type | default | description |" and len({line.count(" | ") for line in shown}) == 1
    assert any(line.startswith("| run.checkpoint_every | number | 5.0 | ") for line in shown)
    wrong = bulkrun("schema", "samplin")
    assert wrong.exit_code == 2 and "did you mean sampling?" in wrong.stderr
    assert bulkrun("schema", "run", "--format", "json").exit_code == 2


def test_a_narrow_terminal_shows_the_keys_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.cli.output._WIDTH_WITHOUT_TERMINAL", 80)
    shown = bulkrun("schema", "sampling").stdout.splitlines()
    first = {line.split()[0] for line in shown if line.startswith("sampling")}
    assert {"sampling.presence_penalty", "sampling.structured_outputs.grammar"} <= first
    assert max(map(len, shown)) <= 80
    assert any("number (default 0.0). Subtracted from" in line for line in shown)


def test_models_lists_what_runs_and_describes_one() -> None:
    assert "Qwen3ForCausalLM" in bulkrun("models").stdout
    assert as_json("models", "bundled:tiny")["max_model_len"] >= 512
    assert bulkrun("models", "bundled:none").exit_code == 1


def test_logs_are_events_and_the_ends_of_logs_for_people_and_programs(folder: Path) -> None:
    found = as_json("logs", "out", "-n", "3")
    assert len(found["events"]) == 3 and all({"time", "worker", "event"} <= set(event) for event in found["events"])
    assert all(name.endswith(".log") and len(lines) <= 3 for name, lines in found["logs"].items())
    shown = bulkrun("logs", "out", "-n", "3").stdout.splitlines()
    assert [line.split()[2] for line in shown[:3]] == [event["event"] for event in found["events"]]
    assert bulkrun("logs", "out", "--json", "--follow").exit_code == 2


def test_every_command_takes_json_but_those_that_the_readme_names() -> None:
    without = {
        name
        for name, command in main.commands.items()
        if not hasattr(command, "commands") and not any("--json" in parameter.opts for parameter in command.params)
    }
    assert without == {"init", "watch", "schema", "export"}  # the first only writes
    said = "takes `--json`, but for `watch`, which goes on, and `schema` and `export`, whose formats are their own"
    assert said in (Path(__file__).parents[2] / "README.md").read_text()


def test_doctor_finds_this_machine_fit(folder: Path) -> None:
    checks = {check["name"]: check["state"] for check in as_json("doctor")["checks"]}
    assert checks["torch"] == checks["disk"] == checks["hard links"] == "ok"


def test_doctor_survives_what_it_was_called_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libtorch_cpu.so: cannot open shared object file\nand more")

    monkeypatch.setattr("bulkrun.launch.doctor._processor", broken)
    result = bulkrun("doctor", "--json")
    found = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert result.exit_code == 1 and found["disk"]["state"] == "ok"
    assert found["processor"]["state"] == "fail"
    assert found["processor"]["detail"] == "OSError: libtorch_cpu.so: cannot open shared object file"


@pytest.mark.parametrize("command", [("status",), ("errors",), ("verify",), ("report",), ("query", "SELECT 1")])
def test_a_directory_that_is_no_run_is_said_to_be_none(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *rest = command
    result = bulkrun(name, str(tmp_path), *rest)
    assert result.exit_code == 1
    assert "not a run" in result.stderr
