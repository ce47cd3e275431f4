"""`submit` when something goes wrong before the first row: what is said, what is left behind, how it goes on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from bulkrun.cli import main
from bulkrun.data.inputs.reader import Dataset, open_input
from bulkrun.data.storage.durable import temporary, write_new_json
from bulkrun.errors import Interrupted, ResumeError, RunError
from bulkrun.executors.child_errors import received
from bulkrun.job.jobfile.load import load_job
from bulkrun.job.plan.planner import dry_plan
from bulkrun.job.store.claims import Claims
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import open_run
from bulkrun.job.store.workers import LifeWatch, Worker, read_workers
from bulkrun.job.views.listing import statuses
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT, prepare
from bulkrun.launch.processes.planner import PlannerProcess, plan_run
from tests.full_disk import file_size_limit
from tests.job.without_model import start_without_model
from tests.launch.one_process import one_process
from tests.signalled import LONG_SELECT
from tests.waiting import wait_until

JOB = """\
name: try
model: bundled:tiny
input: {path: rows.jsonl, id: name}
prompt: {template: "{{ source }}"}
sampling: {max_tokens: 4, temperature: 0}
output: {path: out}
engine: {dtype: float32}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"name": f"f{i % 5}", "source": f"def f{i}(): pass"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    start_without_model(monkeypatch)
    return tmp_path


def submit(*settings: str, flags: tuple[str, ...] = ()) -> Result:
    """The command with all of its work in this process, on a fake engine."""
    with one_process():
        return submit_with_processes(*settings, flags=flags)


def submit_with_processes(*settings: str, flags: tuple[str, ...] = ()) -> Result:
    """The command with its processes, which have such an engine too."""
    options = [part for setting in settings for part in ("--set", setting)]
    return CliRunner().invoke(main, ["submit", "job.yaml", *options, *flags], catch_exceptions=False)


def test_an_unknown_column_ends_the_start_and_the_mended_job_runs(folder: Path) -> None:
    result = submit_with_processes("prompt.template='{{ sorce }}'")
    assert result.exit_code == 2
    assert "sorce" in result.stderr
    assert "source" in result.stderr
    assert submit_with_processes().exit_code == 0


def aside_of(folder: Path) -> list[Path]:
    return list(folder.glob("out.*"))


def ids(out: Path) -> list[str]:
    return sorted(str(name) for part in out.glob("*.parquet") for name in pq.read_table(part)["name"].to_pylist())


@pytest.mark.parametrize(
    ("setting", "said"),
    [("prompt.template='{{ sorce }}'", "sorce"), ("input.sql=SELECT nothing FROM input", "nothing")],
)
def test_a_fresh_start_of_a_wrong_job_leaves_the_old_results_where_they_are(
    folder: Path, setting: str, said: str
) -> None:
    assert submit().exit_code == 0
    before = {path: path.stat().st_ino for path in folder.glob("out/*")}
    refused = submit(setting, flags=("--fresh",))
    assert refused.exit_code == 2 and said in refused.stderr and "old results" not in refused.stderr
    assert {path: path.stat().st_ino for path in folder.glob("out/*")} == before and not aside_of(folder)


def test_old_results_come_back_when_only_the_whole_input_shows_what_is_wrong(folder: Path) -> None:
    assert submit_with_processes().exit_code == 0
    before = ids(folder / "out")
    refused = submit_with_processes("input.on_duplicate=fail", flags=("--fresh",))
    assert refused.exit_code == 2 and "the old results are back in out" in refused.stderr
    assert ids(folder / "out") == before and not aside_of(folder)


def test_a_fresh_start_on_a_full_disk_puts_the_old_results_back(folder: Path) -> None:
    assert submit().exit_code == 0
    with file_size_limit(100):
        refused = submit(flags=("--fresh",))
    assert refused.exit_code == 1 and "run.json" in refused.stderr
    assert "the old results are back in out" in refused.stderr
    assert (folder / "out/_SUCCESS").exists() and not list(folder.glob("out.*"))


def test_a_fresh_start_says_where_the_old_results_are(folder: Path) -> None:
    assert submit().exit_code == 0
    done = submit("sampling.max_tokens=2", flags=("--fresh",))
    (aside,) = aside_of(folder)
    assert done.exit_code == 0 and f"the old results are now in {aside}" in done.stderr
    assert ids(aside) == ids(folder / "out")


def test_validate_refuses_a_directory_of_other_files_as_submit_does(folder: Path) -> None:
    there = ("--set", "output.path=.")
    said = [CliRunner().invoke(main, [command, "job.yaml", *there]) for command in ("validate", "submit")]
    assert [result.exit_code for result in said] == [2, 2]
    assert all("holds files that do not belong to a run" in result.stderr for result in said), said[0].stderr


def test_a_query_that_fails_is_said_and_the_mended_one_runs(folder: Path) -> None:
    result = submit("input.sql=SELECT nothing FROM input")
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    assert submit("input.sql=SELECT * FROM input WHERE name = 'f0'").exit_code == 0
    assert sum(pq.read_metadata(path).num_rows for path in (folder / "out").glob("*.parquet")) == 2


def test_a_refusal_names_the_input_files_that_changed(folder: Path) -> None:
    rows = (folder / "rows.jsonl").read_text()
    for number in range(5):
        (folder / f"more{number}.jsonl").write_text(rows)
    first = prepare(load_job(folder / "job.yaml", ["input.path='*.jsonl'"]))
    first.enter(first.record(None), resume_anyway=False)
    first.run.shard(0).touch()
    (folder / "more3.jsonl").write_text(rows + rows)
    again = prepare(first.spec)
    said = r"input\.files: 6 -> 6 files, 1 new or changed\n(.*\n)*New or changed: more3\.jsonl$"
    with pytest.raises(ResumeError, match=said):
        again.enter(again.record(None), resume_anyway=False)


def test_a_walltime_that_ends_before_the_first_step_is_said(folder: Path) -> None:
    result = submit_with_processes("run.walltime=1")
    assert (
        result.exit_code == 75
        and "0 rows are done and saved; run.walltime, 1 s, leaves no time after start" in result.stderr
    )


def test_an_allocation_that_ends_before_the_first_step_is_said_as_a_walltime_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(folder))  # no Slurm to ask
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 1))
    result = submit_with_processes()
    said = "0 rows are done and saved; the allocation's time leaves no time after start"
    assert result.exit_code == 75 and said in result.stderr, result.stderr


def test_duplicate_ids_are_kept_apart_or_refused(folder: Path) -> None:
    refused = submit("input.on_duplicate=fail")
    assert refused.exit_code == 2
    assert "f0" in refused.stderr
    result = submit()
    assert result.exit_code == 0 and "1 row has the id of an earlier row ('f0' in rows 0, 5)" in result.stderr
    assert json.loads((folder / "out/_SUCCESS").read_text())["duplicate_ids"] == 1
    status = CliRunner().invoke(main, ["status", "out"]).stdout
    assert "duplicate ids" in status
    rows = [row for path in (folder / "out").glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    assert sorted((row["row"], row["name"]) for row in rows) == [(i, f"f{i % 5}") for i in range(6)]


@pytest.mark.parametrize(("name", "text"), [("rows.jsonl", ""), ("rows.jsonl", "\n  \n"), ("rows.csv", "")])
def test_an_empty_input_is_a_finished_run_without_rows(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    result = submit(f"input.path={name}")
    assert result.exit_code == 0 and "the input has no rows" in result.stderr
    assert json.loads((folder / "out/_SUCCESS").read_text())["rows"] == 0
    shown = CliRunner().invoke(main, ["query", "out", "SELECT response FROM results", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout)["rows"] == []
    assert submit(f"input.path={name}").exit_code == 0


def test_a_run_of_no_rows_has_the_columns_of_its_input_in_queries_and_exports(folder: Path) -> None:
    columns = {
        "name": pa.string(),
        "source": pa.string(),
        "day": pa.timestamp("ms", "UTC"),
        "tags": pa.list_(pa.int16()),
    }
    pq.write_table(pa.schema(columns).empty_table(), folder / "rows.parquet")
    assert submit("input.path=rows.parquet").exit_code == 0
    shown = CliRunner().invoke(main, ["query", "out", "SELECT day, tags FROM results WHERE name = 'a'", "--json"])
    assert shown.exit_code == 0 and json.loads(shown.stdout) == {
        "columns": ["day", "tags"],
        "rows": [],
        "truncated": False,
    }
    done = CliRunner().invoke(main, ["export", "out", "--format", "parquet", "-o", "out.parquet"])
    assert done.exit_code == 0
    assert [(field.name, field.type) for field in pq.read_schema("out.parquet")][:4] == list(columns.items())


@pytest.mark.parametrize(
    "setting",
    ["input.sql=SELECT * FROM input WHERE name = 'f0'", "prompt={}", "input.columns=[name]", "prompt.system=x"],
)
def test_an_empty_input_needs_no_column_that_the_job_names(folder: Path, setting: str) -> None:
    (folder / "rows.jsonl").write_text("")
    prepared = prepare(load_job(Path("job.yaml"), [setting]))
    with prepared.open_dataset() as dataset:
        report = dry_plan(prepared.spec, dataset, prepared.tokenizer, prepared.max_model_len)
    assert report.counters.rows == 0


def test_fresh_keeps_the_old_results_beside_the_new(folder: Path) -> None:
    assert submit().exit_code == 0
    changed = submit("sampling.max_tokens=5")
    assert changed.exit_code == 4
    assert submit("sampling.max_tokens=5", flags=("--fresh",)).exit_code == 0
    assert len([path for path in folder.iterdir() if path.name.startswith("out")]) == 2


def test_half_written_files_go_when_a_finished_run_is_submitted_again_a_day_later(folder: Path) -> None:
    assert submit().exit_code == 0
    old, young = temporary(folder / "out/_SUCCESS"), temporary(folder / "out/_SUCCESS")
    for path in (old, young):
        path.touch()
    os.utime(old, (1, 1))
    assert submit().exit_code == 0 and not old.exists() and young.exists()


def test_a_changed_input_is_noticed(folder: Path) -> None:
    assert submit().exit_code == 0
    with (folder / "rows.jsonl").open("a") as file:
        file.write('{"name": "new", "source": "pass"}\n')
    result = submit()
    assert result.exit_code == 4
    assert "input.files" in result.stderr


def replace_input(folder: Path) -> None:
    """Other contents of the same length, at the same time."""
    path = folder / "rows.jsonl"
    stat, text = path.stat(), path.read_text()
    path.write_text(text.replace("pass", "pasS"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def planned(folder: Path, *settings: str) -> None:
    """Plan the job as the planner's process does, in this one."""
    prepared = prepare(load_job(folder / "job.yaml", settings))
    record = open_run(prepared.run, prepared.record(None))
    plan_run(prepared.run, record, prepared, Worker.this_process())


def test_an_input_that_changes_while_it_is_planned_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write_then_replace(path: Path, document: dict[str, Any]) -> bool:
        if path.name == "window-00001.json":
            replace_input(folder)
        return write_new_json(path, document)

    monkeypatch.setattr("bulkrun.job.plan.planner.write_new_json", write_then_replace)
    with pytest.raises(ResumeError, match=r"rows\.jsonl changed since the run began"):
        planned(folder, "run.window_rows=2")
    assert sorted(path.name for path in (folder / "out/.bulkrun/plan").glob("w*")) == [
        "window-00000.json",
        "window-00001.json",
    ]
    assert submit("run.window_rows=2").exit_code == 4
    assert submit("run.window_rows=2", flags=("--fresh",)).exit_code == 0


def test_the_rows_of_a_query_stay_when_the_input_changes_after_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_then_replace(path: Path, document: dict[str, Any]) -> bool:
        replace_input(folder)
        return write_new_json(path, document)

    monkeypatch.setattr("bulkrun.job.plan.planner.write_new_json", write_then_replace)
    planned(folder, "run.window_rows=2", "input.sql=SELECT * FROM input")
    assert json.loads((folder / "out/.bulkrun/plan/complete.json").read_text())["rows"] == 6


def test_an_input_that_changes_while_a_query_reads_it_is_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_then_replace(*args: Any, **options: Any) -> Dataset:
        dataset = open_input(*args, **options)
        replace_input(folder)
        return dataset

    monkeypatch.setattr("bulkrun.launch.preparation.prepare.open_input", open_then_replace)
    with pytest.raises(ResumeError, match=r"rows\.jsonl changed since the run began"):
        planned(folder, "input.sql=SELECT * FROM input")


def test_columns_that_come_too_late_for_the_output_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bulkrun.data.inputs.jsonl.SAMPLE_LINES", 200)
    rows = [{"name": f"f{i}", "source": "pass"} | ({"note": "n"} if i > 200 else {}) for i in range(203)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "column 'note' is neither in prompts nor in the output: it first comes after the sample"
    done = submit()
    assert done.exit_code == 0 and told in done.stderr and "2 times" in done.stderr
    shown = CliRunner().invoke(main, ["plan", "job.yaml"], catch_exceptions=False)
    assert told in shown.stderr


def test_a_torn_parquet_file_is_named_before_anything_runs(folder: Path) -> None:
    (folder / "rows.parquet").write_bytes(b"PAR1 and then the power went")
    result = submit("input.path=rows.parquet")
    assert result.exit_code == 2
    assert "rows.parquet" in result.stderr
    assert list(folder.glob("out/*.parquet")) == []


def test_hopeless_rows_stop_the_job_at_max_error_rate(folder: Path) -> None:
    (folder / "rows.jsonl").write_text('{"name": 1, "source": "x"}\n' + "{torn\n" * 300)
    result = submit_with_processes("input.id=null")
    assert result.exit_code == 1
    assert "max_error_rate" in result.stderr


def test_a_planner_that_dies_without_a_word_is_noticed(tmp_path: Path) -> None:
    planner = PlannerProcess(RunDir(tmp_path / "no-run"), "none")
    assert planner._child is not None
    assert os.getsid(planner._child.pid) == planner._child.pid, "Ctrl-C in a terminal is the supervisor's alone"
    planner._child.kill()
    planner._child.wait()
    with pytest.raises(RunError, match="planner"):
        planner.check()


def test_below_a_folder_that_is_named_like_a_state_a_run_is_one_like_any_other(folder: Path) -> None:
    assert submit("output.path=.bulkrun/out").exit_code == 0
    assert pq.read_table(folder / ".bulkrun/out/part-00000.parquet").num_rows == 6


@pytest.mark.parametrize("command", ["submit", "validate"])
def test_the_place_of_what_is_staged_in_a_run_is_refused(folder: Path, command: str) -> None:
    result = CliRunner().invoke(main, [command, "job.yaml", "--set", "output.path=.bulkrun/next"])
    assert result.exit_code == 2 and "output.path: .bulkrun/next is where bulkrun keeps" in result.stderr
    assert not (folder / ".bulkrun").exists()


def test_a_job_file_whose_name_is_not_utf8_is_refused_before_anything_is_made(folder: Path) -> None:
    odd = Path(os.fsdecode(b"j\xff.yaml"))
    (folder / "job.yaml").rename(odd)
    result = CliRunner().invoke(main, ["submit", str(odd)], catch_exceptions=False)
    assert result.exit_code == 2 and "j\\udcff" in result.stderr and "not UTF-8; rename" in result.stderr
    assert not (folder / "out").exists()


def test_a_run_in_a_folder_whose_name_is_not_utf8_hides_no_other_run(folder: Path) -> None:
    assert submit("output.path=odd").exit_code == 0
    (folder / "odd").rename(folder / os.fsdecode(b"k\xff"))
    assert submit().exit_code == 0
    states = {listed.root.name: listed.state for listed in statuses(folder)}
    assert states == {"out": "completed", r"k\xff": "damaged"}
    command = [sys.executable, "-m", "bulkrun", "list", str(folder), "--json"]
    listed = subprocess.run(command, capture_output=True, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"})
    assert listed.returncode == 0, listed.stderr
    assert [run["state"] for run in json.loads(listed.stdout)["runs"]] == ["damaged", "completed"]


def test_a_home_directory_in_output_path_is_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder / "home"))
    assert submit("output.path=~/results").exit_code == 0
    assert (folder / "home/results/_SUCCESS").exists() and not (folder / "~").exists()
    shown = CliRunner().invoke(main, ["query", "~/results", "SELECT count(*) AS n FROM results", "--json"])
    assert json.loads(shown.stdout)["rows"] == [{"n": 6}]
    assert submit("output.path=~/results").exit_code == 0


def test_outputs_that_were_cut_are_counted(folder: Path) -> None:
    result = submit("sampling.max_tokens=1", "sampling.ignore_eos=true")
    assert "6 outputs were cut at max_tokens" in result.stderr
    assert json.loads((folder / "out/_SUCCESS").read_text())["cut"] == 6
    assert "raise sampling.max_tokens, or shorten prompts" in result.stderr
    assert "6 outputs cut at max_tokens" in CliRunner().invoke(main, ["status", "out"]).stdout


def test_outputs_that_the_models_length_cuts_are_not_put_down_to_max_tokens_alone(folder: Path) -> None:
    keys = ("engine.max_model_len=60", "run.on_too_long=truncate_right", "sampling.ignore_eos=true")
    result = submit(*keys, "sampling.max_tokens=1000", "run.max_tokens_per_row=59")
    assert "cut at max_tokens or the model's length (finish_reason 'length')" in result.stderr
    assert "raise sampling.max_tokens or run.max_tokens_per_row, or shorten prompts" in result.stderr
    assert "cut at max_tokens or the model's length" in CliRunner().invoke(main, ["status", "out"]).stdout


def test_the_number_to_raise_is_the_rows_own_where_it_has_one(folder: Path) -> None:
    row = {"text": "def f(): pass", "most": 1}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    keys = ("input={path: rows.jsonl}", "sampling.ignore_eos=true")
    said = submit(*keys, "prompt={column: text}", "sampling.per_row={max_tokens: most}").stderr
    assert "raise sampling.max_tokens (for rows with a value in 'most': that), or shorten prompts" in said
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    line = {"custom_id": "a", "url": "/v1/chat/completions", "body": body}
    (folder / "rows.jsonl").write_text(json.dumps(line) + "\n")
    said = submit(*keys, "prompt={}", "output.path=batch").stderr
    assert "raise sampling.max_tokens (for lines with their own: that), or shorten prompts" in said


def test_a_template_that_uses_no_column_is_refused(folder: Path) -> None:
    result = submit("prompt={template: 'Rate this: {source}'}")
    assert result.exit_code == 2 and "write {{ source }} for {source}" in result.stderr


@pytest.mark.parametrize(
    ("key", "text"),
    [("output.path", "$OUT/m"), ("output.path", "${OUT}"), ("input.path", "$DATA_DIR/rows.jsonl"), ("model", "~/$M")],
)
def test_a_variable_in_a_path_is_refused_unless_something_is_called_so(folder: Path, key: str, text: str) -> None:
    result = submit(f"{key}={text}")
    assert result.exit_code == 2 and "variables are not expanded in a job file" in result.stderr
    assert f'--set {key}="{text}"' in result.stderr and not list(folder.glob("$*"))


def test_a_directory_whose_name_looks_like_a_variable_is_that_directory(folder: Path) -> None:
    (folder / "$OUT").mkdir()
    assert submit("output.path=$OUT/m").exit_code == 0
    assert (folder / "$OUT/m/_SUCCESS").exists()


def test_a_start_that_fails_on_its_input_leaves_no_run(folder: Path) -> None:
    assert submit("prompt.template='{{ sorce }}'").exit_code == 2
    assert not (folder / "out").exists()
    (folder / "out").mkdir()
    assert submit("prompt.template='{{ sorce }}'").exit_code == 2
    assert list((folder / "out").iterdir()) == []
    (folder / "out/.keep").touch()
    assert submit("prompt.template='{{ sorce }}'").exit_code == 2
    assert [path.name for path in (folder / "out").iterdir()] == [".keep"]
    assert submit().exit_code == 0
    assert submit("prompt.template='{{ sorce }}'").exit_code == 4
    assert (folder / "out/_SUCCESS").exists()


def test_a_mistake_that_is_found_late_says_where_in_the_job_file_it_stands(folder: Path) -> None:
    text = (folder / "job.yaml").read_text()
    (folder / "job.yaml").write_text(text.replace("rows.jsonl", "rosw.jsonl"))
    result = submit()
    assert result.exit_code == 2 and "error: job.yaml:3:9: input.path: 'rosw.jsonl' does not exist" in result.stderr
    assert "did you mean 'rows.jsonl'?" in result.stderr
    (folder / "job.yaml").write_text(text.replace("{{ source }}", "{{ sorce }}"))
    assert "error: job.yaml:4:10: prompt.template: the input has no column 'sorce'" in submit().stderr
    assert "error: --set input.id: the input has no column 'nam'" in submit("input.id=nam").stderr
    (folder / "job.yaml").write_text(text.replace("bundled:tiny", "./nowhere"))
    assert "error: job.yaml:2:1: model: no such directory: './nowhere'" in submit().stderr
    (folder / "job.yaml").write_text(text)
    (folder / "rows.jsonl").write_text('{"name": "a", "source": "b", "response": "c"}\n')
    assert "error: job.yaml:3:1: input.columns: the input's column 'response' is named like" in submit().stderr


@pytest.mark.parametrize("place", ["rows.jsonl/m", "rows.jsonl", "/proc/nope/m"])
def test_a_place_where_no_run_can_be_is_said_by_validate_and_submit(folder: Path, place: str) -> None:
    shown = CliRunner().invoke(main, ["validate", "job.yaml", "--set", f"output.path={place}"])
    assert shown.exit_code == 2 and "choose another output.path" in shown.stderr
    if place != "rows.jsonl":
        result = submit(f"output.path={place}")
        assert result.exit_code == 1 and "choose another output.path" in result.stderr


def test_the_id_goes_to_the_output_whatever_the_columns(folder: Path) -> None:
    assert submit("input.columns=[source]").exit_code == 0
    [part] = (folder / "out").glob("*.parquet")
    assert pq.read_schema(part).names[:3] == ["name", "source", "row"]


def test_what_a_query_cannot_read_comes_with_how_to_join(folder: Path) -> None:
    result = submit("input.sql=SELECT * FROM input JOIN 'authors.parquet' USING (name)")
    assert result.exit_code == 2 and "list both there and name both in the SQL" in result.stderr


def with_long_query() -> tuple[RunDir, str]:
    """A run whose planner is busy in DuckDB for several seconds, and its id."""
    prepared = prepare(load_job(Path("job.yaml"), ["input.id=null", f"input.sql={LONG_SELECT}"]))
    return prepared.run, open_run(prepared.run, prepared.record(None)).run_id


def queries(run: RunDir) -> bool:
    """Whether the planner has begun its query."""
    return any(run.sql_snapshot.parent.glob("tmp/*/input.tmp"))


def test_a_planner_in_a_long_query_stops_at_once(folder: Path) -> None:
    run, run_id = with_long_query()
    planner = PlannerProcess(run, run_id)
    wait_until(lambda: queries(run), "a query", 30)
    began = time.monotonic()
    planner.stop()
    assert time.monotonic() - began < 3
    assert [state.ended for state in read_workers(run)] == ["interrupted"] and not queries(run)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell a process of its parent's end")
def test_a_planner_does_not_outlive_its_supervisor(folder: Path) -> None:
    run, run_id = with_long_query()
    code = "import sys; from bulkrun.launch.processes.planner import *; "
    code += "child = PlannerProcess(RunDir(Path(sys.argv[1])), sys.argv[2])"
    code += "; time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(run.root), run_id]) as supervisor:
        wait_until(lambda: queries(run), "a query", 30)
        supervisor.kill()
    wait_until(lambda: all(state.worker.gone for state in read_workers(run)), "the end of the workers", 3)
    assert not run.sql_snapshot.exists()


def test_a_planner_whose_supervisor_was_killed_before_it_could_look_does_nothing(folder: Path) -> None:
    prepared = prepare(load_job(folder / "job.yaml"))
    run_id = open_run(prepared.run, prepared.record(None)).run_id
    command = [sys.executable, "-m", "bulkrun.launch.processes.planner", "out", run_id, str(os.getppid())]
    assert subprocess.run(command, check=False).returncode == 75
    assert not prepared.run.plan_complete.exists() and not read_workers(prepared.run)


def test_a_planner_that_stands_by_ends_when_it_is_told_to(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(load_job(folder / "job.yaml"))
    run, record = prepared.run, open_run(prepared.run, prepared.record(None))
    assert Claims(run, Worker.this_process(), LifeWatch(run)).take("plan")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(Interrupted):
        plan_run(run, record, prepared, Worker.this_process(), should_stop=lambda: True)


def test_a_planner_whose_model_was_replaced_meanwhile_plans_nothing(folder: Path) -> None:
    """Rows of another tokenizer would stay in the plan when the model is brought back."""
    shutil.copytree(BUNDLED_ROOT / "tiny", folder / "model")
    prepared = prepare(load_job(folder / "job.yaml", ["model=model"]))
    run_id = open_run(prepared.run, prepared.record(None)).run_id
    (folder / "model/tokenizer.json").write_text((folder / "model/tokenizer.json").read_text() + "\n")
    command = [sys.executable, "-m", "bulkrun.launch.processes.planner", "out", run_id, str(os.getpid())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4 and "the model is no longer the one" in str(received(done.stdout)), done.stderr
    assert not prepared.run.planned_shards()


def test_what_the_models_generation_config_asks_in_vain_is_said_once(folder: Path) -> None:
    shutil.copytree(BUNDLED_ROOT / "tiny", folder / "model")
    (folder / "model/generation_config.json").write_text(json.dumps({"stop_strings": ["x"], "num_beams": 4}))
    said = "the model's generation_config.json has stop_strings, num_beams, which is not applied"
    first, again = submit("model=model"), submit("model=model")
    assert (first.exit_code, again.exit_code) == (0, 0)
    assert (said in first.stderr, said in again.stderr) == (True, False)
