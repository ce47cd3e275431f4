"""A worker process, without its process: what it makes sure of before it works."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from bulkrun.errors import ResumeError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.workers import Worker
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT, prepare
from bulkrun.launch.processes import worker
from bulkrun.launch.processes.signals import drain_on_signal
from bulkrun.launch.processes.supervisor import Supervisor
from bulkrun.request import Engine
from tests.job.fake_engine import FakeEngine


def test_a_model_that_is_replaced_while_it_is_loaded_makes_no_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a copy of tonight's checkpoint over last night's does, which takes as long as loading it."""
    model = shutil.copytree(BUNDLED_ROOT / "tiny", tmp_path / "model", copy_function=os.symlink)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    job = {"name": "a", "model": str(model), "input": {"path": str(tmp_path / "in.jsonl")}}
    spec = job_of({**job, "prompt": {"column": "text"}, "output": {"path": str(tmp_path / "out")}})
    prepared = prepare(spec)
    record = prepared.enter(prepared.record(None), resume_anyway=False)

    def load(adapter: str) -> Engine:
        (model / "generation_config.json").unlink(missing_ok=True)
        (model / "generation_config.json").write_text('{"eos_token_id": 3}')
        return FakeEngine()

    monkeypatch.setattr(worker, "engine_factory", lambda prepared: load)
    with drain_on_signal() as drain, pytest.raises(ResumeError, match=r"the model is no longer the one(?s:.*)--fresh"):
        worker.work(RunDir(tmp_path / "out"), record, Worker.this_process(), Supervisor(os.getppid()), drain)
    assert not list(RunDir(tmp_path / "out").journal.iterdir())
