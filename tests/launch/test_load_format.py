"""Jobs over other models than the bundled kind: random weights, and an architecture of the general path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import transformers
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from bulkrun.cli import main
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from tests.launch.one_process import one_process, own_engine
from tests.models.tiny_quantized import per_row

JOB = """\
name: try
model: model
input: {path: rows.jsonl}
prompt: {column: source}
sampling: {max_tokens: 5, temperature: 0, ignore_eos: true}
output: {path: out}
engine: {dtype: float32, device: cpu, load_format: auto}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job over a model directory that has a tokenizer and no model yet."""
    rows = [{"source": f"def f{i}(): pass"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "job.yaml").write_text(JOB)
    shutil.copytree(BUNDLED_ROOT / "tiny", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(*settings: str) -> Result:
    options = [part for setting in settings for part in ("--set", setting)]
    with one_process(own_engine):
        return CliRunner().invoke(main, ["submit", "job.yaml", *options], catch_exceptions=False)


def test_random_weights_are_told_wherever_the_model_is(folder: Path) -> None:
    dummy = ("--set", "engine.load_format=dummy")
    warning = "random weights (engine.load_format: dummy)"
    for command in ("validate", "plan", "submit"):
        with one_process():
            done = CliRunner().invoke(main, [command, "job.yaml", *dummy], catch_exceptions=False)
        assert done.exit_code == 0 and f"warning: {warning}" in done.stderr
    assert warning in CliRunner().invoke(main, ["status", "out"]).stdout
    assert json.loads(CliRunner().invoke(main, ["status", "out", "--json"]).stdout)["random_weights"] is True
    planned = CliRunner().invoke(main, ["plan", "job.yaml", *dummy, "--json"], catch_exceptions=False)
    assert json.loads(planned.stdout)["random_weights"] is True
    again = CliRunner().invoke(main, ["submit", "job.yaml", *dummy, "--json"], catch_exceptions=False)
    assert json.loads(again.stdout)["random_weights"] is True
    shutil.copy(BUNDLED_ROOT / "tiny" / "model.safetensors", folder / "model")
    for told in (CliRunner().invoke(main, ["validate", "job.yaml"]), submit("output.path=real")):
        assert told.exit_code == 0 and warning not in told.output
    assert warning not in CliRunner().invoke(main, ["status", "real"]).stdout


def test_random_weights_are_another_run_than_the_models_own(folder: Path) -> None:
    assert submit("engine.load_format=dummy").exit_code == 0
    assert sum(pq.read_metadata(path).num_rows for path in (folder / "out").glob("*.parquet")) == 6
    shutil.copy(BUNDLED_ROOT / "tiny" / "model.safetensors", folder / "model")
    assert submit().exit_code == 4


@pytest.mark.parametrize(
    "setting", ["engine.quantization=fp8", "engine.quantization=int8", "engine.kv_cache_dtype=fp8"]
)
def test_numbers_in_8_bits_are_another_run_than_the_models_own(folder: Path, setting: str) -> None:
    shutil.copy(BUNDLED_ROOT / "tiny" / "model.safetensors", folder / "model")
    assert submit("engine.kv_cache_dtype=bfloat16").exit_code == 0
    assert submit().exit_code == 0
    assert submit(setting).exit_code == 4
    assert submit(setting, "output.path=other").exit_code == 0
    assert sum(pq.read_metadata(path).num_rows for path in (folder / "other").glob("*.parquet")) == 6


def test_a_job_over_a_checkpoint_in_fp8(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Rows have the tokens of the dequantized weights, and asking for products in fp8 makes another run."""
    raw = json.loads((folder / "model" / "config.json").read_text())
    stored, plain = {}, load_file(BUNDLED_ROOT / "tiny" / "model.safetensors")
    for name, weight in plain.items():
        stored[name] = weight
        if name.endswith("_proj.weight"):
            stored[name], scale = per_row(weight.float())
            stored[f"{name}_scale"], plain[name] = scale, stored[name].float() * scale.float()
    write(folder / "model", stored, raw | {"quantization_config": {"quant_method": "fbgemm_fp8"}})
    assert submit().exit_code == 0
    assert "dequantized and take the memory of float32" in caplog.text
    assert submit("engine.quantization=fp8").exit_code == 4
    write(folder / "model", plain, raw)
    assert submit("output.path=plain").exit_code == 0
    assert responses(folder / "out") == responses(folder / "plain")


def write(model: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    save_file(tensors, model / "model.safetensors")
    (model / "config.json").write_text(json.dumps(config))


def responses(out: Path) -> list[str]:
    (part,) = out.glob("*.parquet")
    return pq.read_table(part)["response"].to_pylist()


def test_a_job_over_an_architecture_of_the_general_path(folder: Path) -> None:
    vocab_size = json.loads((folder / "model" / "config.json").read_text())["vocab_size"]
    config = transformers.GPT2Config(vocab_size=vocab_size, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder / "model")
    assert submit().exit_code == 0
    (part,) = (folder / "out").glob("*.parquet")
    assert pq.read_table(part)["completion_tokens"].to_pylist() == [5] * 6


def test_a_model_that_cannot_work_is_refused_before_any_work(folder: Path) -> None:
    (folder / "model" / "config.json").write_text(json.dumps({"architectures": ["RwkvForCausalLM"], "state_size": 8}))
    result = submit()
    assert result.exit_code == 1
    assert "RwkvForCausalLM is not supported" in result.stderr
    assert not (folder / "out").exists()
