"""Workers under supervision, as real processes: who dies is replaced, what kills is found, no row is lost or double."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from bulkrun.errors import RunError
from bulkrun.executors.frozen import SILENT_S
from bulkrun.executors.local import DEATHS_IN_A_ROW, LocalWorkers
from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import read_workers
from tests.executors.fake_worker import job_of, rows_of
from tests.job.small_runs import enter, oracle, results, write_plan

ROOT = Path(__file__).resolve().parents[2]


def workers_on(
    out: Path,
    rows: int,
    shard_rows: int,
    *options: str,
    count: int = 1,
    module: str = "tests.executors.fake_worker",
    silent_s: float = SILENT_S,
) -> LocalWorkers:
    run, _ = enter(out, job_of(out))
    write_plan(run, rows_of(rows), shard_rows)

    def command(worker: str) -> list[str]:
        return [sys.executable, "-m", module, str(out), str(rows), str(shard_rows), "--id", worker, *options]

    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return LocalWorkers(run, command, [environment] * count, first_pause_s=0.05, silent_s=silent_s)


def tend_to_the_end(workers: LocalWorkers) -> None:
    try:
        while workers.tend():
            time.sleep(0.01)
    finally:
        workers.kill()
        workers.stop()


def deaths(out: Path) -> Counter[str]:
    return Counter(event["how"] for event in read_events(RunDir(out)) if event["event"] == "worker_died")


def errors_of(out: Path) -> dict[int, str]:
    return {row["row"]: row["error_code"] for row in results(out) if row["error_code"] not in (None, "bad_input")}


@pytest.mark.parametrize(
    ("die", "how", "bad"),
    [
        ("segv", "signal SIGSEGV", [137]),
        pytest.param("exit137", "exit status 137", [60, 61], marks=pytest.mark.slow),
        ("lost", "exit status 70", [137]),
    ],
)
def test_retry_goes_to_the_same_dead_engine(tmp_path: Path, die: str, how: str, bad: list[int]) -> None:
    out, rows = tmp_path / "out", rows_of(300)
    poison = ",".join(map(str, bad))
    tend_to_the_end(workers_on(out, 300, 50, "--poison", poison, "--die", die))
    assert errors_of(out) == dict.fromkeys(bad, "engine_error")
    got, want = results(out), oracle(rows, job_of(out))
    assert [row for row in got if row["row"] not in bad] == [row for row in want if row["row"] not in bad]
    assert set(deaths(out)) == {how}
    assert deaths(out)[how] <= 5 * len(bad), "32 rows in the engine: groups of 4, of 1, alone again"
    assert not list(RunDir(out).flight.iterdir())


def test_a_row_whose_answer_kills_its_reader_is_found_and_not_those_that_ran_meanwhile(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tend_to_the_end(workers_on(out, 600, 300, "--poisoned-answer", "237", "--max-num-seqs", "4"))
    assert errors_of(out) == {237: "engine_error"}
    assert deaths(out)["exit status 1"] <= 5


def test_a_machine_on_which_every_row_dies_stops_the_run_and_blames_no_row(tmp_path: Path) -> None:
    out = tmp_path / "out"
    everything = ",".join(str(row) for row in range(200) if rows_of(200)[row].token_ids)
    with pytest.raises(
        RunError, match=r"died 5 times in a row without finishing a row, the last with signal SIGKILL \(.*memory"
    ):
        tend_to_the_end(workers_on(out, 200, 50, "--poison", everything, "--die", "kill"))
    assert deaths(out).total() == DEATHS_IN_A_ROW
    tend_to_the_end(workers_on(out, 200, 50))
    assert results(out) == oracle(rows_of(200), job_of(out))


def test_a_worker_that_cannot_even_start_is_not_tried_again_and_the_end_of_its_stderr_is_shown(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(
        RunError, match=r"failed before its first row(.|\n)*ends with:(.|\n)*No module named tests.none"
    ):
        tend_to_the_end(workers_on(out, 10, 10, module="tests.none"))
    assert not deaths(out)


ENDS_SIX_TIMES = """
import pathlib, sys
flight, lives = map(pathlib.Path, sys.argv[1:])
flight.parent.mkdir(exist_ok=True)
flight.write_text('{"finished": true}\\n')
with lives.open("a") as file:
    file.write(".")
sys.exit(0 if lives.stat().st_size > 6 else 70)
"""


def test_deaths_between_which_rows_are_finished_end_no_run_however_many(tmp_path: Path) -> None:
    run, _ = enter(tmp_path / "out", job_of(tmp_path / "out"))

    def command(worker: str) -> list[str]:
        return [sys.executable, "-c", ENDS_SIX_TIMES, str(run.flight_file(worker)), str(tmp_path / "lives")]

    tend_to_the_end(LocalWorkers(run, command, [{}], first_pause_s=0.01))
    assert deaths(tmp_path / "out") == {"exit status 70": 6} and DEATHS_IN_A_ROW < 6


def test_killing_workers_by_hand_convicts_nobody(tmp_path: Path) -> None:
    out = tmp_path / "out"
    workers = workers_on(out, 120, 40, "--step-s", "0.02", count=2)
    killed: list[str] = []
    while workers.tend():
        at_work = [place for place in workers._places if place.process is not None and place.worker not in killed]
        victim = next((place for place in at_work if has_finished_rows(RunDir(out), place.worker)), None)
        if len(killed) < 4 and victim is not None:
            os.kill(victim.process.pid, signal.SIGKILL)
            killed.append(victim.worker)
        time.sleep(0.01)
    assert len(killed) == 4 and deaths(out) == {"signal SIGKILL": 4}
    assert not errors_of(out), "no row is blamed"
    assert results(out) == oracle(rows_of(120), job_of(out))


def test_unequal_shards_finish_cleanly_on_all_workers(tmp_path: Path) -> None:
    """Trap: an early-finishing rank crashes the others."""
    out = tmp_path / "out"
    tend_to_the_end(workers_on(out, 110, 100, "--step-s", "0.005", count=2))
    assert results(out) == oracle(rows_of(110), job_of(out))
    assert not deaths(out)


def test_stop_lets_workers_save_and_ends_those_that_do_not(tmp_path: Path) -> None:
    out = tmp_path / "out"
    workers = workers_on(out, 200, 100, "--step-s", "0.05", count=2)
    while not list(RunDir(out).journal.glob("*.jsonl")):
        workers.tend()
        time.sleep(0.02)
    frozen, other = sorted(workers._places, key=lambda place: not has_a_shard(RunDir(out), place.worker))
    processes = [place.process for place in (frozen, other) if place.process is not None]
    processes[0].send_signal(signal.SIGSTOP)
    assert workers.stop(grace_s=5.0) == []
    assert processes[0].returncode == -signal.SIGKILL
    assert processes[1].returncode in (75, -signal.SIGTERM), "SIGTERM before its handler was there ends it too"
    tend_to_the_end(workers_on(out, 200, 100))
    assert results(out) == oracle(rows_of(200), job_of(out))


def test_of_four_workers_one_is_frozen_past_its_claim_and_wakes_again(tmp_path: Path) -> None:
    frozen_out, out = tmp_path / "frozen", tmp_path / "unbroken"
    workers = workers_on(frozen_out, 160, 20, "--step-s", "0.01", "--ttl-s", "1", "--max-num-seqs", "4", count=4)
    run = RunDir(frozen_out)
    frozen = None
    deadline = time.monotonic() + 60
    while workers.tend() and time.monotonic() < deadline:
        if frozen is None and len(list(run.journal.glob("*.jsonl"))) >= 4:
            frozen = next(place.process for place in workers._places if has_a_shard(run, place.worker))
            assert frozen is not None
            frozen.send_signal(signal.SIGSTOP)
        if frozen is not None and run.success.exists() and frozen.poll() is None:
            frozen.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    assert frozen is not None and frozen.returncode == 0, "it finds everything done by others and ends in order"
    tend_to_the_end(workers_on(out, 160, 20))
    assert results(frozen_out) == results(out) == oracle(rows_of(160), job_of(out))


def test_a_worker_that_is_frozen_for_good_is_replaced(tmp_path: Path) -> None:
    out = tmp_path / "out"
    workers = workers_on(out, 120, 40, "--step-s", "0.02", "--ttl-s", "1", silent_s=3.0)
    run, frozen = RunDir(out), None
    deadline = time.monotonic() + 60
    while workers.tend() and time.monotonic() < deadline:
        process = workers._places[0].process
        if frozen is None and process is not None and list(run.journal.glob("*.jsonl")):
            frozen = process
            frozen.send_signal(signal.SIGSTOP)
        time.sleep(0.01)
    workers.kill()
    workers.stop()
    assert frozen is not None and frozen.returncode == -signal.SIGKILL
    assert "worker_frozen" in [event["event"] for event in read_events(run)]
    assert results(out) == oracle(rows_of(120), job_of(out))


SAYS_WHERE_IT_IS = """
import json, os, pathlib, sys
known = [os.environ["CUDA_VISIBLE_DEVICES"], os.getsid(0) == os.getpid()]
pathlib.Path(sys.argv[1]).write_text(json.dumps(known))
"""


def test_each_worker_has_the_gpu_that_it_was_given_and_a_session_that_ctrl_c_does_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm names all GPUs of an element in its environment."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    run, _ = enter(tmp_path / "out", job_of(tmp_path / "out"))

    def command(worker: str) -> list[str]:
        return [sys.executable, "-c", SAYS_WHERE_IT_IS, str(tmp_path / f"{worker}.json")]

    tend_to_the_end(LocalWorkers(run, command, [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in "23"]))
    assert sorted(json.loads(path.read_text()) for path in tmp_path.glob("*.json")) == [["2", True], ["3", True]]


def has_a_shard(run: RunDir, worker: str) -> bool:
    """Whether this worker has a shard open."""
    return any(run.journal.glob(f"shard-*.{worker}.jsonl"))


def has_finished_rows(run: RunDir, worker: str) -> bool:
    """Whether this worker has written rows to a journal that is still open."""
    try:
        return any(path.stat().st_size for path in run.journal.glob(f"shard-*.{worker}.jsonl"))
    except FileNotFoundError:  # committed meanwhile
        return False


def test_an_idle_worker_helps_with_the_tail_of_anothers_shard(tmp_path: Path) -> None:
    out = tmp_path / "out"
    tend_to_the_end(workers_on(out, 200, 200, "--step-s", "0.02", "--max-num-seqs", "4", count=2))
    assert results(out) == oracle(rows_of(200), job_of(out))
    ran = [state.progress["num_generations"] for state in read_workers(RunDir(out))]
    assert len(ran) == 2 and min(ran) > 40, "one shard, and both worked on it"
    assert sum(ran) < 181 + 20, "181 rows can run: hardly any ran twice"


def test_a_helper_that_is_killed_leaves_nothing_undone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    workers = workers_on(out, 200, 200, "--step-s", "0.02", "--max-num-seqs", "4", count=2)
    run, killed = RunDir(out), False
    while workers.tend():
        processes = {place.worker: place.process for place in workers._places if place.process is not None}
        journals = [] if killed else sorted(run.journal.glob("*.jsonl"), key=lambda path: path.stat().st_ctime_ns)
        if len(journals) == 2 and all(path.stat().st_size > 1000 for path in journals):
            os.kill(processes[journals[1].name.split(".")[1]].pid, signal.SIGKILL)
            killed = True
        time.sleep(0.01)
    assert killed
    assert results(out) == oracle(rows_of(200), job_of(out))
