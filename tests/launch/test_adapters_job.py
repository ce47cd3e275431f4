"""A job with several adapters (`engine.adapters`): each row's answer is that of a job with its adapter alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

import bulkrun
from bulkrun.cli import main
from bulkrun.errors import JobFileError, ModelError, ResumeError
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.engine import engine_factory
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT, PreparedJob, prepare
from bulkrun.launch.runs import probe
from bulkrun.launch.runs.preview import check_job, preview_job
from bulkrun.request import Engine
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_adapters import save_adapter

TINY = BUNDLED_ROOT / "tiny"
NAMES = ("legal", "poems")
ASKED = ["def close(self):", "def read_lines(path):", "return None"]
SAMPLING = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters of the bundled model."""
    folder = tmp_path_factory.mktemp("trained")
    for seed, name in enumerate(NAMES):
        base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        save_adapter(folder / name, base, seed=seed, r=3, target_modules=["q_proj", "v_proj", "down_proj"])
    return folder


@pytest.fixture
def adapters(trained: Path, tmp_path: Path) -> dict[str, str]:
    return {name: str(shutil.copytree(trained / name, tmp_path / name)) for name in NAMES}


@pytest.fixture(scope="module")
def answers(trained: Path) -> dict[str | None, list[str]]:
    """What each prompt is answered with one adapter alone, and without."""
    settings: dict[str | None, Any] = {name: {"adapter": trained / name} for name in NAMES} | {None: {}}
    models = {name: bulkrun.LLM("bundled:tiny", dtype="float32", **own) for name, own in settings.items()}
    return {name: [str(one.text) for one in model.generate(ASKED, SAMPLING)] for name, model in models.items()}


def job_with(adapters: dict[str, str], folder: Path, **engine: Any) -> dict[str, Any]:
    rows = [
        {"id": f"{lora}/{n}", "text": text, "lora": lora} for n, text in enumerate(ASKED) for lora in (*NAMES, None)
    ]
    if not (folder / "in.jsonl").exists():
        (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "name": "adapted",
        "model": "bundled:tiny",
        "input": {"path": str(folder / "in.jsonl"), "id": "id", "adapter": "lora"},
        "prompt": {"column": "text", "chat_template": "none"},
        "sampling": SAMPLING,
        "engine": {"dtype": "float32", "adapters": adapters, **engine},
        "output": {"path": str(folder / "out"), "rows_per_file": 2},
    }


def found(folder: Path) -> dict[str | None, list[str]]:
    """The answers of each adapter's rows, in input order."""
    rows = [row for part in folder.glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    rows.sort(key=lambda row: int(row["row"]))
    return {lora: [row["response"] for row in rows if row["lora"] == lora] for lora in (*NAMES, None)}


def test_each_row_is_answered_as_with_its_adapter_alone(
    adapters: dict[str, str], answers: dict[str | None, list[str]], tmp_path: Path
) -> None:
    """As a user runs it, in processes, two of them."""
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job_with(adapters, tmp_path, device="cpu")))
    done = CliRunner().invoke(main, ["submit", str(file), "--workers", "2"])
    assert done.exit_code == 0, done.stderr
    assert found(tmp_path / "out") == answers
    assert len({tuple(each) for each in answers.values()}) == 3, "they differ"


def test_an_openai_batch_names_them_as_its_models(
    adapters: dict[str, str], answers: dict[str | None, list[str]], tmp_path: Path
) -> None:
    rows = [
        {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": {"prompt": text, "model": lora}}
        for n, text in enumerate(ASKED)
        for lora in (*NAMES, "bundled:tiny")
    ]
    job = job_with(adapters, tmp_path)
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with one_process(own_engine):
        bulkrun.run_job(job | {"input": {"path": str(tmp_path / "in.jsonl")}, "prompt": {}})
    parts = [row for part in (tmp_path / "out").glob("*.parquet") for row in pq.read_table(part).to_pylist()]
    texts = [row["response"] for row in sorted(parts, key=lambda row: int(row["row"]))]
    assert [texts[0::3], texts[1::3], texts[2::3]] == [answers["legal"], answers["poems"], answers[None]]


def test_an_adapter_that_changed_is_another_run_and_one_that_moved_is_not(
    adapters: dict[str, str], answers: dict[str | None, list[str]], tmp_path: Path
) -> None:
    with one_process(own_engine):
        bulkrun.run_job(job_with(adapters, tmp_path))
        moved = adapters | {"poems": str(shutil.move(adapters["poems"], tmp_path / "moved"))}
        assert not bulkrun.run_job(job_with(moved, tmp_path)).worked
        config = tmp_path / "moved" / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 8}))
        with pytest.raises(ResumeError, match=r"\n  engine\.adapters\.poems: .* -> "):
            bulkrun.run_job(job_with(moved, tmp_path))
    assert found(tmp_path / "out") == answers


def test_a_night_runs_the_rows_of_adapters_that_came_changed_or_went(adapters: dict[str, str], tmp_path: Path) -> None:
    """What an incremental job runs again is told by each row's own adapter, not by all of them."""
    job = job_with({"legal": adapters["legal"]}, tmp_path) | {"run": {"incremental": True, "max_error_rate": 1.0}}

    def night(now: dict[str, str]) -> dict[str, int]:
        job["engine"]["adapters"] = now
        with one_process(own_engine):
            done = bulkrun.run_job(job)
        return {name: count for name, count in (done.changes or {}).items() if count}

    with one_process(own_engine):
        assert bulkrun.run_job(job).totals.errors == {"bad_input": 3}, "nobody knows poems yet"
    assert night(adapters) == {"changed": 3, "unchanged": 6}, "they have prompts now"
    assert night(adapters) == {"unchanged": 9}
    config = Path(adapters["legal"]) / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 8}))
    assert night(adapters) == {"changed": 3, "unchanged": 6}
    assert night({"legal": adapters["legal"]}) == {"changed": 3, "unchanged": 6}, "as errors again"


def test_a_worker_looks_at_the_adapter_that_it_loads(adapters: dict[str, str], tmp_path: Path) -> None:
    """Each byte of it; of all, each time, would take long where there are many."""
    prepared = prepare(JobSpec.model_validate(job_with(adapters, tmp_path)))
    record = prepared.enter(prepared.record(None), resume_anyway=False)
    weights = Path(adapters["poems"]) / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    prepared.check_model(record, "legal")
    prepared.check_model(record, "")
    with pytest.raises(ResumeError, match=r"is no longer the one .*:\n  engine\.adapters\.poems: .* -> .*\nBring it"):
        prepared.check_model(record, "poems")
    with pytest.raises(ResumeError, match=r"engine\.adapters\.poems"):
        prepared.check_model(record)


def test_a_preview_runs_each_row_with_its_adapter(
    adapters: dict[str, str], answers: dict[str | None, list[str]], tmp_path: Path
) -> None:
    spec = JobSpec.model_validate(job_with(adapters, tmp_path))
    shown = [row.response for row in preview_job(spec, 3)]
    assert shown == [answers["legal"][0], answers["poems"][0], answers[None][0]]
    assert check_job(spec)["adapters"] == "legal, poems"


def test_a_probe_runs_the_adapter_of_most_rows_and_says_how_many_loads_there_are(
    adapters: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def factory(prepared: PreparedJob) -> Callable[[str], Engine]:
        make = engine_factory(prepared)
        return lambda name: loaded.append(name) or make(name)  # type: ignore[func-returns-value]

    monkeypatch.setattr(probe, "engine_factory", factory)
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(job_with(adapters, tmp_path, device="cpu")))
    rows = [json.loads(line) for line in (tmp_path / "in.jsonl").read_text().splitlines()]
    more = [row | {"text": f"{row['text']} # {n}"} for n in range(2) for row in rows if row["lora"] == "poems"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows + more))
    said = CliRunner().invoke(main, ["plan", str(file), "--probe", "1"], catch_exceptions=False).output
    assert loaded == ["poems"]
    assert re.search(r"\nadapters +2 more loads of the model on top; the probe ran with poems, outputs", said), said


def test_the_models_own_tokenizer_beside_an_adapter_is_fine_and_another_one_is_told(
    adapters: dict[str, str], tmp_path: Path
) -> None:
    job, poems = job_with(adapters, tmp_path), Path(adapters["poems"])
    job["prompt"] = {"column": "text"}
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, poems)
    tokenizer = json.loads((poems / "tokenizer.json").read_text())
    padded = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None}
    padded |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    (poems / "tokenizer.json").write_text(json.dumps(tokenizer | {"padding": padded}))  # as trainers leave it
    prepare(JobSpec.model_validate(job))
    (poems / "chat_template.jinja").write_text("{{ messages[0].content }} is what was asked:")
    said = r"engine\.adapters\.poems: .* has another chat template than the model; name the one of all rows in prompt\."
    with pytest.raises(ModelError, match=said):
        prepare(JobSpec.model_validate(job))
    prepare(JobSpec.model_validate(job | {"prompt": {"column": "text", "chat_template": "none"}}))
    more = {"id": 9999, "content": "<more>", "special": True, "single_word": False, "lstrip": False, "rstrip": False}
    tokenizer["added_tokens"].append(more | {"normalized": False})
    (poems / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match=r"engine\.adapters\.poems: .* has another tokenizer than the model \([\d,]+ "):
        prepare(JobSpec.model_validate(job))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"engine": {"adapters": {}}}, r"input\.adapter: there are none to name; list them in engine\.adapters"),
        ({"engine": {"adapter": "legal"}}, r"engine\.adapters: goes not with adapter, which all rows have; leave one"),
        ({"engine": {"load_format": "dummy"}}, r"engine\.adapters: means nothing to the random weights"),
        ({"engine": {"adapters": {"legal": ""}}}, r"engine\.adapters: each has a name and a directory or hub id"),
        ({"engine": {"adapters": {"bundled:tiny": "l"}}}, r"engine\.adapters: 'bundled:tiny' is the model, and rows"),
        ({"task": "embed"}, r"engine\.adapters: with task: embed all rows have one model; run a job for each"),
    ],
)
def test_what_cannot_be_is_said_when_the_job_is_read(
    adapters: dict[str, str], tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    job = job_with(adapters, tmp_path)
    if "task" in changes:
        job = {key: value for key, value in job.items() if key not in ("sampling", "prompt")} | changes
    else:
        job["engine"] |= changes["engine"]
    with pytest.raises(JobFileError, match=said):
        bulkrun.run_job(job)


def test_one_that_is_not_there_is_named(adapters: dict[str, str], tmp_path: Path) -> None:
    job = job_with(adapters | {"poems": str(tmp_path / "nowhere")}, tmp_path)
    with pytest.raises(ModelError, match=r"engine\.adapters\.poems: no such directory"):
        bulkrun.run_job(job)
    assert not (tmp_path / "out").exists()
