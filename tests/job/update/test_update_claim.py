"""Who may change a run: one at a time, and at last whoever follows one that died where nobody can look."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bulkrun.data.storage.durable import temporary, write_new_json
from bulkrun.errors import RunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import LifeWatch, Worker, read_workers
from bulkrun.job.update.update_claim import hold
from tests.job.store.test_workers import ELSEWHERE, Clock, beat


def claim(run: RunDir, worker: Worker = ELSEWHERE) -> None:
    write_new_json(run.claims / "update.1", asdict(worker))


@pytest.mark.parametrize("heartbeat", [True, False])
def test_one_that_died_before_a_reboot_or_on_another_host_is_waited_for_once(run: RunDir, heartbeat: bool) -> None:
    clock = Clock()

    def sleep(seconds: float) -> None:
        clock.now += seconds

    claim(run)
    if heartbeat:  # a power cut may have emptied it
        beat(run, ELSEWHERE, 7)
    with hold(run, life=LifeWatch(run, clock=clock), sleep=sleep):
        assert 1030 <= clock.now < 1040
    assert not list(run.claims.iterdir()), "the next one would wait again"
    before = clock.now
    with hold(run, life=LifeWatch(run, clock=clock), sleep=sleep):
        assert clock.now == before


def test_the_heartbeats_of_earlier_nights_go_and_those_of_the_run_stay(run: RunDir) -> None:
    beat(run, replace(ELSEWHERE, id="runner"), 9, ended="completed")
    for _ in range(3):
        with hold(run):
            pass
    assert sorted(state.role for state in read_workers(run)) == ["runner", "updater"]


def test_what_a_planner_kept_goes_with_its_heartbeat_when_it_died(run: RunDir) -> None:
    living, dead = Worker.this_process(), replace(Worker.this_process(), id="killed", started="long ago")
    for worker in (living, dead):
        (run.spool / worker.id).mkdir(parents=True)
        (run.spool / worker.id / "ids-0").touch()
        beat(run, worker, 1, ended="completed" if worker is living else None)
    with hold(run):
        assert [path.name for path in run.spool.iterdir()] == [living.id]


def test_half_written_files_of_the_killed_go_a_day_later(run: RunDir) -> None:
    targets = (run.success, run.run_json, run.claims / "update.1", run.plan_complete, run.worker_file("w"))
    old, young = ([temporary(path) for path in targets] for _ in range(2))
    for path in [*old, *young]:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (probe := run.root / ".bulkrun-ab12cd_3").mkdir()  # a look whether anything can be written here
    for path in [*old, probe]:
        os.utime(path, (1, 1))
    with hold(run):
        assert not probe.exists()
        assert [path.exists() for path in [*old, *young]] == [False] * 5 + [True] * 5


def test_one_that_lives_on_another_host_is_named_and_keeps_its_claim(run: RunDir) -> None:
    beats = iter(range(100))
    claim(run)
    with pytest.raises(RunError, match="process 1"), hold(run, sleep=lambda _: beat(run, ELSEWHERE, next(beats))):
        pass
    assert [path.name for path in run.claims.iterdir()] == ["update.1"]


def test_of_two_that_begin_at_once_the_second_is_told_who_is_first(run: RunDir) -> None:
    first = replace(Worker.this_process(), id="first")
    claim(run, first)  # and its heartbeat is just being written
    with (
        pytest.raises(RunError, match=f"process {first.pid}"),
        hold(run, sleep=lambda _: beat(run, first, 1)),
    ):
        pass
    assert [state.worker for state in read_workers(run)] == [first]


def test_after_a_night_on_a_full_disk_the_same_process_may_try_again(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, document: dict[str, object], *, sync: bool) -> None:
        raise RunError(f"{path}: writing failed: No space left on device")

    with monkeypatch.context() as meanwhile, pytest.raises(RunError, match="what the night was writing"), hold(run):
        meanwhile.setattr("bulkrun.job.store.heartbeat.replace_json", full)
        raise RunError("what the night was writing")
    with hold(run):
        pass
    with monkeypatch.context() as meanwhile, pytest.raises(RunError, match="No space"):
        meanwhile.setattr("bulkrun.job.store.heartbeat.replace_json", full)
        with hold(run):
            pass
    assert not list(run.claims.iterdir())
