"""A job with `engine.adapter`: its answers are the merged model's, and another adapter is another run."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import bulkrun
from bulkrun.cli import main
from bulkrun.errors import JobFileError, ModelError, ResumeError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.workers import Worker
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT, prepare
from bulkrun.launch.processes.signals import DrainOnSignal
from bulkrun.launch.processes.supervisor import Supervisor
from bulkrun.launch.processes.worker import work
from bulkrun.launch.runs.retry import retry
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_adapters import save_adapter

TINY = BUNDLED_ROOT / "tiny"
SAMPLING = {"temperature": 0, "max_tokens": 12}
ASKED = ["def close(self):", "def read_lines(path):", "return None"]


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with an adapter added by PEFT; the adapter is its neighbour."""
    folder = tmp_path_factory.mktemp("adapted")
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model = save_adapter(folder / "adapter", base, r=3, target_modules=["q_proj", "v_proj", "down_proj"])
    shutil.copytree(TINY, folder / "merged", ignore=shutil.ignore_patterns("*.safetensors"))
    config, files = (TINY / "config.json").read_bytes(), folder / "merged"
    model.merge_and_unload().save_pretrained(files)
    (files / "config.json").write_bytes(config)
    return files


@pytest.fixture
def adapter(merged: Path, tmp_path: Path) -> Path:
    return shutil.copytree(merged.parent / "adapter", tmp_path / "adapter")


def job_with(adapter: Path | None, folder: Path, **engine: Any) -> dict[str, Any]:
    if not (folder / "in.jsonl").exists():
        (folder / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ASKED))
    return {
        "name": "adapted",
        "model": "bundled:tiny",
        "input": {"path": str(folder / "in.jsonl")},
        "prompt": {"column": "text", "chat_template": "none"},
        "sampling": SAMPLING,
        "engine": {"dtype": "float32", **({"adapter": str(adapter)} if adapter else {}), **engine},
        "output": {"path": str(folder / "out")},
    }


def run(job: dict[str, Any]) -> list[str]:
    with one_process(own_engine):
        done = bulkrun.run_job(job)
    rows = [row for part in done.run.parts().values() for row in pq.read_table(part).to_pylist()]
    return [row["response"] for row in sorted(rows, key=lambda row: int(row["row"]))]


def answers(model: str | Path, **engine: Any) -> list[str | None]:
    return [one.text for one in bulkrun.LLM(model, dtype="float32", **engine).generate(ASKED, SAMPLING)]


def test_answers_are_the_merged_models(merged: Path, adapter: Path, tmp_path: Path) -> None:
    theirs = answers(merged)
    assert run(job_with(adapter, tmp_path)) == theirs == answers("bundled:tiny", adapter=str(adapter))
    assert theirs != answers("bundled:tiny")


def test_another_adapter_is_another_run_and_the_same_one_elsewhere_is_not(adapter: Path, tmp_path: Path) -> None:
    before = run(job_with(adapter, tmp_path))
    moved = shutil.move(adapter, tmp_path / "moved")
    assert run(job_with(moved, tmp_path)) == before
    config = json.loads((moved / "adapter_config.json").read_text())
    (moved / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 8}))
    with pytest.raises(ResumeError, match=r"engine\.adapter"):
        run(job_with(moved, tmp_path))
    with pytest.raises(ResumeError, match=r"engine\.adapter"):
        run(job_with(None, tmp_path))


def test_a_worker_that_starts_later_finds_the_same_adapter_or_stops(adapter: Path, tmp_path: Path) -> None:
    """Only `submit` compares a job with its run; who joins, or has its turn in Slurm's queue, begins hours later."""
    run(job_with(adapter, tmp_path))
    record = read_record(RunDir(tmp_path / "out"))
    prepared = prepare(JobSpec.model_validate(record.job), warns=False)
    prepared.check_model(record)
    (adapter / "adapter_config.json").write_text(
        json.dumps(json.loads((adapter / "adapter_config.json").read_text()) | {"lora_alpha": 8})
    )
    with pytest.raises(ResumeError, match=r"no longer the one that the run began with:\n  engine\.adapter: .* -> "):
        prepared.check_model(record)
    worker, drain = Worker.this_process(), DrainOnSignal()
    with pytest.raises(ResumeError, match=r"engine\.adapter: .* -> "):
        work(RunDir(tmp_path / "out"), record, worker, Supervisor(os.getpid()), drain)


def test_a_retry_with_another_adapter_knows_it_as_its_own(adapter: Path, tmp_path: Path) -> None:
    other = shutil.copytree(adapter, tmp_path / "other")
    (other / "adapter_config.json").write_text(
        json.dumps(json.loads((other / "adapter_config.json").read_text()) | {"lora_alpha": 8})
    )
    job = job_with(adapter, tmp_path, max_model_len=20)
    with (tmp_path / "in.jsonl").open("a") as stream:
        stream.write(json.dumps({"text": "def close(self): " * 10}) + "\n")
    assert run(job)[-1] is None
    with one_process(own_engine):
        changes = [f"engine.adapter={other}", "engine.max_model_len=200"]
        done = retry(tmp_path / "out", mock.Mock(), overrides=changes)
    assert done.totals.errors == {}


def test_the_adapters_tokenizer_and_chat_template_count(merged: Path, adapter: Path, tmp_path: Path) -> None:
    trained = shutil.copytree(merged, tmp_path / "trained")
    (trained / "chat_template.jinja").write_text("{{ messages[0].content }} is what was asked:")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(trained / name, adapter)
    asked = [[{"role": "user", "content": ASKED[0]}]]
    [ours] = bulkrun.LLM("bundled:tiny", adapter=str(adapter), dtype="float32").chat(asked, SAMPLING)
    [theirs] = bulkrun.LLM(trained, dtype="float32").chat(asked, SAMPLING)
    [others] = bulkrun.LLM(merged, dtype="float32").chat(asked, SAMPLING)
    assert ours.text == theirs.text != others.text


def test_a_tokenizer_in_its_older_form_counts_too(adapter: Path, tmp_path: Path) -> None:
    model = json.loads((TINY / "tokenizer.json").read_text())["model"]
    (adapter / "vocab.json").write_text(json.dumps(model["vocab"]))
    (adapter / "merges.txt").write_text("".join(" ".join(pair) + "\n" for pair in model["merges"]))
    config = json.loads((TINY / "tokenizer_config.json").read_text())
    asked = {"tokenizer_class": "Qwen2Tokenizer", "chat_template": "{{ messages[0].content }} is what was asked:"}
    (adapter / "tokenizer_config.json").write_text(json.dumps(config | asked))
    [output] = bulkrun.LLM("bundled:tiny", adapter=adapter, dtype="float32").chat(
        [[{"role": "user", "content": "What"}]], SAMPLING
    )
    assert output.prompt == "What is what was asked:"


def test_what_is_no_adapter_is_said_before_anything_runs(adapter: Path, tmp_path: Path) -> None:
    for wrong, message in (
        (TINY, r"no adapter_config\.json"),
        (tmp_path / "nowhere", r"engine\.adapter: no such directory"),
        (
            adapter / "adapter_config.json",
            r"engine\.adapter: .* is a file; give the directory that holds adapter_config",
        ),
    ):
        with pytest.raises(ModelError, match=message):
            run(job_with(wrong, tmp_path))
    with pytest.raises(JobFileError, match=r"engine\.adapter: means nothing to the random weights"):
        run(job_with(adapter, tmp_path, load_format="dummy"))
    assert not (tmp_path / "out").exists()


def test_an_adapter_as_the_model_is_told_where_it_belongs(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"adapter \(LoRA\): name its base as the model, and this directory in engine\.adapter"
    ):
        run(job_with(None, tmp_path) | {"model": str(adapter)})


def test_an_adapter_of_a_larger_model_is_said_before_anything_runs(adapter: Path, tmp_path: Path) -> None:
    weights = adapter / "adapter_model.safetensors"
    larger = {name.replace("layers.0.", "layers.77."): tensor for name, tensor in load_file(weights).items()}
    save_file(larger, weights)
    with pytest.raises(ModelError, match=r"changes model\.layers\.77\..*, which the model does not have"):
        run(job_with(adapter, tmp_path))
    assert not (tmp_path / "out").exists()


def test_validate_says_what_is_wrong(adapter: Path, tmp_path: Path) -> None:
    (adapter / "adapter_model.safetensors").unlink()
    job = tmp_path / "job.yaml"
    job.write_text(json.dumps(job_with(adapter, tmp_path)))
    done = CliRunner().invoke(main, ["validate", str(job)])
    assert done.exit_code == 1 and "no adapter_model.safetensors" in done.stderr
