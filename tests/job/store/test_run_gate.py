"""The gate into a run: what continues, what is refused and how it is said, what is moved aside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bulkrun.data.storage.durable import replace_json
from bulkrun.errors import ResumeError, RunError, UsageError
from bulkrun.job.store import replaced, run_gate
from bulkrun.job.store.aside import move_aside, refuse_live_workers
from bulkrun.job.store.fingerprint import differences, fingerprint
from bulkrun.job.store.replaced import OwnRun
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import open_run, start_anew
from bulkrun.job.store.run_record import RunRecord, new_record, read_record, record_document
from bulkrun.job.store.workers import LifeWatch, Worker, WorkerState
from tests.job.fake_engine import FakeEngine
from tests.job.small_runs import enter, job, make_rows, oracle, results, start, write_plan
from tests.job.store.test_workers import ELSEWHERE, Clock, beat


def wanted(path: Path, changes: dict[str, Any] | None = None, **facts: Any) -> RunRecord:
    document = job(path).model_dump()
    for key, value in (changes or {}).items():
        section, _, name = key.rpartition(".")
        (document[section] if section else document)[name] = value
    input_facts, model_facts = {"bytes": 10, "hash": "aa"} | facts, {"hash": "m1"}
    return new_record(
        document, input_facts=input_facts, model_facts=model_facts, versions={"bulkrun": "1"}, job_file="j.yaml"
    )


def open_planned(path: Path) -> RunRecord:
    """Enter a new run that has a shard already."""
    record = open_run(RunDir(path), wanted(path))
    RunDir(path).shard(0).touch()
    return record


def test_values_for_the_chat_template_make_another_run(tmp_path: Path) -> None:
    prompt = wanted(tmp_path).job["prompt"]
    plain = wanted(tmp_path)
    kinds = [{"think": value} for value in (True, 1, None, {})]
    changed = [wanted(tmp_path, {"prompt": {**prompt, "chat_template_kwargs": kind}}) for kind in kinds]
    for one in changed:
        assert set(differences(plain.identity, one.identity)) == {"prompt.chat_template_kwargs"}
    assert len({fingerprint(one.identity) for one in changed}) == 4
    swapped = [{"prompt": {**prompt, "chat_template_kwargs": dict(pairs)}} for pairs in ([("a", 1), ("b", 2)],) * 2]
    swapped[1]["prompt"]["chat_template_kwargs"] = {"b": 2, "a": 1}
    assert wanted(tmp_path, swapped[0]).identity == wanted(tmp_path, swapped[1]).identity


def test_a_new_directory_gets_a_private_record(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "deep/out")
    record = open_run(run, wanted(run.root))
    assert read_record(run) == record and len(record.run_id) == 16
    assert run.state.stat().st_mode & 0o777 == 0o700
    document = json.loads(run.run_json.read_text())
    assert set(document["fingerprints"]) == {"model", "input", "prompt", "sampling", "output", "plan"}


@pytest.mark.parametrize(
    "changes",
    [
        {"engine": {**job(Path("x")).model_dump()["engine"], "max_num_seqs": 3}},
        {"run.checkpoint_every": 9.0},
        {"run.max_error_rate": 0.1},
        {"name": "other"},
        {"input.hint": "make it"},
    ],
)
def test_engine_and_pace_may_change_freely_and_the_new_values_are_kept(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = RunDir(tmp_path / "out")
    first = open_run(run, wanted(run.root))
    again = open_run(run, wanted(run.root, changes))
    assert again.run_id == first.run_id and again.plan_hash == first.plan_hash
    assert read_record(run).job == wanted(run.root, changes).job


@pytest.mark.parametrize(
    ("changes", "facts", "shown"),
    [
        ({"sampling.temperature": 0.7}, {}, "sampling.temperature: 0.0 -> 0.7"),
        ({"prompt.column": "text"}, {}, "prompt.column: 'doc' -> 'text'"),
        ({"run.limit": 5}, {}, "  run.limit: None -> 5"),
        ({"input.columns": ["doc"]}, {}, r"  input.columns: None -> \['doc'\]"),
        ({"run.on_too_long": "truncate_left"}, {}, "  run.on_too_long: 'error' -> 'truncate_left'"),
        ({}, {"hash": "bb"}, "input.hash: 'aa' -> 'bb'"),
        ({}, {"rows": 3}, "input.rows: None -> 3"),
        ({}, {"files": [[1, 2, "a"]]}, "input.files: 0 -> 1 files, 1 new or changed"),
    ],
)
def test_what_results_depend_on_is_refused_with_the_difference(
    tmp_path: Path, changes: dict[str, Any], facts: dict[str, Any], shown: str
) -> None:
    run = RunDir(tmp_path / "out")
    open_planned(run.root)
    for resume_anyway in (False, True):
        with pytest.raises(ResumeError, match=shown) as error:
            open_run(run, wanted(run.root, changes, **facts), resume_anyway=resume_anyway)
        assert "--fresh" in str(error.value) and "--resume-anyway" not in str(error.value)
        assert error.value.exit_code == 4


@pytest.mark.parametrize(
    "changes",
    [{"input.path": "moved.jsonl"}, {"model": "a/copy"}, {"output.rows_per_file": 9}, {"run.window_rows": 9}],
)
def test_a_harmless_change_names_resume_anyway_and_goes_on_with_it(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = RunDir(tmp_path / "out")
    first = open_planned(run.root)
    with pytest.raises(ResumeError, match="--resume-anyway"):
        open_run(run, wanted(run.root, changes))
    again = open_run(run, wanted(run.root, changes), resume_anyway=True)
    assert again.run_id == first.run_id
    assert again.job["output"]["rows_per_file"] is None, "a half-made plan keeps its shards"
    assert again.job["run"]["window_rows"] == first.job["run"]["window_rows"], "and its windows"


def test_a_run_that_never_planned_anything_takes_the_mended_job(tmp_path: Path) -> None:
    """The template was wrong, planning failed, the user mends the job file: that is no change under a resume."""
    run = RunDir(tmp_path / "out")
    first = open_run(run, wanted(run.root))
    run.sql_snapshot.write_text("of the old query")
    mended = open_run(run, wanted(run.root, {"prompt.column": "text"}))
    assert read_record(run) == mended and mended.run_id != first.run_id
    assert not run.sql_snapshot.exists()


def test_the_plan_of_an_input_that_was_empty_is_not_that_of_the_filled_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    open_run(run, wanted(run.root))
    replace_json(run.plan_complete, {"rows": 0, "shards": 0})  # and a kill before _SUCCESS
    filled = open_run(run, wanted(run.root, bytes=11))
    assert read_record(run) == filled
    assert not run.plan_complete.exists(), "what the planner of the new rows would take for its own"


def test_a_run_whose_planner_is_at_work_does_not_take_another_job(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    open_run(run, wanted(run.root))
    beat(run, Worker.this_process(), 1)
    with pytest.raises(RunError, match="a worker is running here"):
        open_run(run, wanted(run.root, {"prompt.column": "text"}))


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    assert start_anew(RunDir(tmp_path), wanted(tmp_path)) is None
    with pytest.raises(UsageError, match=r"thesis\.tex.*choose an empty"):
        open_run(RunDir(tmp_path), wanted(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UsageError, match="is a file"):
        open_run(RunDir(tmp_path / "thesis.tex"), wanted(tmp_path))


@pytest.mark.parametrize("seen", [".bulkrun/plan/shard-00000.arrow", "part-00000.parquet"])
def test_a_run_that_another_submit_makes_at_the_same_time_is_entered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    """This one is slow (or frozen) between the look for run.json and the look at what else is there."""
    run, look = RunDir(tmp_path), run_gate.refuse_foreign_files

    def late_look(run: RunDir) -> None:
        monkeypatch.undo()
        open_run(run, theirs)
        (run.root / seen).touch()
        look(run)

    theirs = wanted(tmp_path)
    monkeypatch.setattr(run_gate, "refuse_foreign_files", late_look)
    assert open_run(run, wanted(tmp_path)).run_id == theirs.run_id


def test_hidden_files_do_not_make_a_directory_foreign(tmp_path: Path) -> None:
    (tmp_path / ".DS_Store").touch()
    assert open_run(RunDir(tmp_path), wanted(tmp_path))


def test_fresh_keeps_the_old_results_beside_the_new(tmp_path: Path) -> None:
    out, rows = tmp_path / "out", make_rows(9)
    start(out, rows, job(out))
    before = results(out)
    changed = wanted(out, {"sampling.temperature": 0.5})
    aside = start_anew(RunDir(out), changed)
    open_run(RunDir(out), changed)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("out.")] == [aside]
    assert results(aside) == before and results(out) == []


def test_fresh_follows_a_link_to_another_disk(tmp_path: Path) -> None:
    disk, out = tmp_path / "disk/results", tmp_path / "out"
    disk.mkdir(parents=True)
    out.symlink_to(disk)
    start(out, make_rows(9), job(out))
    before = results(out)
    changed = wanted(out, {"sampling.temperature": 0.5})
    aside = start_anew(RunDir(out), changed)
    open_run(RunDir(out), changed)
    assert [path for path in disk.parent.iterdir() if path.name.startswith("results.")] == [aside]
    assert out.is_symlink() and disk.is_dir() and results(aside) == before and results(out) == []
    assert move_aside(RunDir(out)) is not None and not disk.exists()
    open_run(RunDir(out), wanted(out))
    assert disk.is_dir(), "a kill between the two renames leaves a link that leads nowhere"


def test_a_worker_that_was_away_does_not_write_into_the_run_that_replaced_its_own(tmp_path: Path) -> None:
    """It is frozen, taken for dead, the run is started anew with --fresh, and then it wakes up."""
    out, rows = tmp_path / "out", make_rows(60, error_every=0, duplicate_every=0)
    new = job(out, temperature=0.5)

    def replace_the_run_after_a_part() -> bool:
        if RunDir(out).committed_shards() and read_record(RunDir(out)).job["sampling"]["temperature"] == 0.0:
            for path in RunDir(out).workers.glob("*.json"):
                path.unlink()
            move_aside(RunDir(out))
            write_plan(enter(out, new)[0], rows, 10)
        return False

    with pytest.raises(RunError, match="moved aside"):
        start(out, rows, job(out), engine=FakeEngine(step_s=0.05), should_stop=replace_the_run_after_a_part)
    assert not any(path.stat().st_size for path in RunDir(out).journal.iterdir()) and results(out) == []
    start(out, rows, new)
    assert results(out) == oracle(rows, new)


def test_the_record_is_read_again_only_when_it_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, read, real = RunDir(tmp_path / "out"), list[Path](), replaced.read_json
    record = open_run(run, wanted(run.root))
    own = OwnRun(run, record.run_id)
    monkeypatch.setattr(replaced, "read_json", lambda path: read.append(path) or real(path))
    for _ in range(3):
        own.check()
    assert len(read) == 1
    replace_json(run.run_json, record_document(record))
    times = run.run_json.stat().st_mtime_ns
    for _ in range(2):
        own.check()
    assert len(read) == 2
    other = record_document(replace(record, run_id="0" * 16))  # of one size, and of one time where clocks are coarse
    replace_json(run.run_json, other)
    os.utime(run.run_json, ns=(times, times))
    for _ in range(2):
        with pytest.raises(RunError, match="moved aside"):
            own.check()
    run.run_json.unlink()
    with pytest.raises(RunError, match="moved aside"):
        own.check()


def test_fresh_refuses_while_a_worker_lives(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    open_run(run, wanted(run.root))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        worker = replace(Worker.this_process(), id="child", pid=child.pid, started=started)
        replace_json(run.workers / "child.json", asdict(WorkerState(worker, 1, "runner")))
        with pytest.raises(RunError, match=f"process {child.pid}"):
            move_aside(run)
    finally:
        child.kill()
        child.wait()
    assert move_aside(run) is not None


@pytest.mark.parametrize("beats", [False, True])
def test_a_worker_on_another_host_is_waited_for_before_it_is_called_dead(tmp_path: Path, beats: bool) -> None:
    run, clock = RunDir(tmp_path), Clock()
    run.workers.mkdir(parents=True)
    beat(run, ELSEWHERE, 1)

    def sleep(seconds: float) -> None:
        clock.now += seconds
        if beats and clock.now > 1005:
            beat(run, ELSEWHERE, 2)

    if beats:
        with pytest.raises(RunError, match="a worker is running"):
            refuse_live_workers(run, life=LifeWatch(run, clock=clock), sleep=sleep)
    else:
        refuse_live_workers(run, life=LifeWatch(run, clock=clock), sleep=sleep)
        assert clock.now >= 1030


def test_a_run_of_another_format_and_a_directory_that_is_no_run_are_named(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(RunError, match="not a run"):
        read_record(run)
    open_run(run, wanted(tmp_path))
    now = json.loads(run.run_json.read_text())
    for other in (1, 99):
        replace_json(run.run_json, {**now, "format": other})
        for open_it in (read_record, lambda run: open_run(run, wanted(tmp_path))):
            with pytest.raises(RunError, match=f"format {other}.*--fresh"):
                open_it(run)
    assert start_anew(run, wanted(tmp_path)) is not None
    assert open_run(run, wanted(tmp_path)) == read_record(run)
    run.run_json.write_bytes(b'{"run_id": ')
    with pytest.raises(RunError, match="not a whole JSON file"):
        read_record(run)


def test_a_plan_without_a_record_is_not_started_over_silently(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    start(run.root, make_rows(5), job(run.root), should_stop=lambda: True)
    run.run_json.unlink()
    with pytest.raises(RunError, match=r"run\.json: missing"):
        open_run(run, wanted(run.root))


def test_differences_are_dotted_and_a_fingerprint_ignores_key_order() -> None:
    old, new = {"a": {"b": 1, "c": 2}, "d": 3}, {"d": 4, "a": {"c": 2, "e": 5}}
    assert differences(old, new) == {"d": (3, 4), "a.e": (None, 5), "a.b": (1, None)}
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})


def test_a_key_that_this_version_does_not_know_is_perhaps_a_newer_ones(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    open_run(run, wanted(run.root))
    document = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**document, "colour": 1}))
    with pytest.raises(RunError, match=r"unexpected keyword argument 'colour'\); it was written by a newer bulkrun"):
        read_record(run)


def test_the_settings_of_the_command_are_kept_and_an_old_record_has_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "out")
    open_run(run, replace(wanted(run.root), job_file="j.yaml", overrides=["run.workers=2"]))
    assert read_record(run).overrides == ["run.workers=2"]
    open_run(run, replace(wanted(run.root), job_file="j.yaml"))
    assert read_record(run).overrides == []
    document = json.loads(run.run_json.read_text())
    del document["overrides"]
    run.run_json.write_text(json.dumps(document))
    assert read_record(run).overrides == []
