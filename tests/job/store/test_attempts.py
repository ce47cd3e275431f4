"""What failed attempts leave goes with the next start; what holds a row, or may be of the living, stays."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from bulkrun.data.storage.durable import replace_json
from bulkrun.job.store.attempts import forget_failed_attempts
from bulkrun.job.store.run_dir import RunDir, make_state_dirs
from bulkrun.job.store.workers import Worker, WorkerState
from tests.job.store.test_workers import ELSEWHERE

HERE = Worker.this_process()
DEAD = replace(HERE, started="12345")  # its pid is another process by now


def attempt(run: RunDir, worker: Worker, *, ran: int = 0, line: bytes = b"", flies: bool = False) -> None:
    state = WorkerState(worker, 3, "runner", progress={"num_generations": ran})
    replace_json(run.worker_file(worker.id), asdict(state))
    run.journal_file(0, worker.id).write_bytes(line)
    replace_json(run.claims / f"shard-00000.{len(list(run.claims.iterdir())) + 1}", asdict(worker))
    if flies:
        run.flight.mkdir(exist_ok=True)
        run.flight_file(worker.id).write_text('{"in":[[0,0,0]]}\n')


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_what_holds_nothing_goes(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    make_state_dirs(run)
    attempt(run, replace(DEAD, id="idle"))
    attempt(run, replace(DEAD, id="ran"), ran=2, line=b"x")
    attempt(run, replace(DEAD, id="wrote"), line=b"x")
    attempt(run, replace(DEAD, id="crashed"), flies=True)
    attempt(run, replace(ELSEWHERE, id="away"))
    attempt(run, replace(HERE, id="alive"))
    run.flight_file("fell").write_text('{"in":[[0,0,0]]}\n')
    for name, age in (("mute", 130), ("unseen", 5), ("fell", 130)):  # whose heartbeat went, or is not seen here yet
        run.journal_file(0, name).touch()
        os.utime(run.journal_file(0, name), (time.time() - age,) * 2)
    replace_json(run.claims / "plan.1", asdict(DEAD))
    replace_json(run.claims / "update.1", asdict(DEAD))
    forget_failed_attempts(run)
    assert left(run.workers) == ["alive.json", "away.json", "crashed.json", "ran.json"]
    stay = ("alive", "away", "crashed", "fell", "ran", "unseen", "wrote")
    assert left(run.journal) == [run.journal_file(0, name).name for name in stay]
    assert left(run.claims) == ["shard-00000.5", "shard-00000.6", "update.1"]
    assert left(run.flight) == ["crashed.jsonl", "fell.jsonl"]
