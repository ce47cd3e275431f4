"""`bulkrun bench`: what it prints, counts and refuses. Nothing here is about how fast anything is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner, Result

import bulkrun
from bulkrun.cli import main
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.engine import ModelChoice, load_for_bench
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.ops.cpu.library import compiled_ops
from tests.models.tiny_adapters import save_adapter
from tests.models.tiny_models import make_tiny_model, save_tiny_model

SMALL = ("--device", "cpu", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def _layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where no call runs all layers."""
    monkeypatch.setattr("bulkrun.models.loading.loader.compile_layers", lambda _: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", *arguments], catch_exceptions=False)


def facts_of(*arguments: str) -> dict[str, Any]:
    done = bench(*arguments, *SMALL, "--json")
    assert done.exit_code == 0, done.stderr
    (line,) = done.stdout.splitlines()
    facts = json.loads(line)
    assert isinstance(facts, dict)
    return facts


def test_throughput_of_a_dataset_counts_its_tokens(model: str, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text("".join(json.dumps({"prompt_token_ids": [7] * n, "max_tokens": n}) + "\n" for n in (1, 5, 9)))
    facts = facts_of("throughput", "--model", model, "--dataset", str(dataset))
    assert (facts["requests"], facts["input_tokens"], facts["output_tokens"]) == (3, 15, 15)
    assert facts["total_tok_s"] == pytest.approx(2 * facts["output_tok_s"], rel=0.01)
    assert facts["wall_s"] > 0 and facts["load_s"] > 0 and facts["dtype"] == "float32"
    assert facts["bulkrun"] == bulkrun.__version__ and facts["processor"]
    settings = [facts[name] for name in ("load_format", "deterministic", "async_scheduling", "batching")]
    assert settings == ["auto", False, False, "continuous"]


def test_settings_that_are_no_defaults_are_told(model: str) -> None:
    lengths = ("--input-len", "9", "--output-len", "2", "--num-requests", "2")
    keys = ("deterministic=true", "async_scheduling=true", "batching=static")
    overrides = [part for key in keys for part in ("--set", f"engine.{key}")]
    facts = facts_of("throughput", "--model", model, "--load-format", "dummy", *lengths, *overrides)
    settings = [facts[name] for name in ("load_format", "deterministic", "async_scheduling", "batching")]
    assert settings == ["dummy", True, True, "static"]


def test_a_roofline_of_the_general_path_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"architectures": ["GPT2LMHeadModel"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = bench("roofline", "--model", str(tmp_path))
    assert refused.exit_code == 2 and "its FLOPs are not known" in refused.stderr


def test_text_prompts_are_encoded_by_the_models_tokenizer(tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "Once upon a time there was a cat", "max_tokens": 2}\n')
    facts = facts_of("throughput", "--model", "bundled:tiny", "--dataset", str(dataset))
    assert 1 <= facts["input_tokens"] < 30 and facts["output_tokens"] == 2


def test_a_model_is_measured_with_its_adapter(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "qwen3")  # without a tokenizer: the adapter's counts
    save_adapter(tmp_path / "adapter", make_tiny_model("qwen3"), target_modules=["q_proj"])
    shutil.copy(BUNDLED_ROOT / "tiny" / "tokenizer.json", tmp_path / "adapter")
    lengths = ("--input-len", "9", "--output-len", "2", "--num-requests", "2")
    adapter = ("--set", f"engine.adapter={tmp_path / 'adapter'}")
    assert facts_of("throughput", "--model", str(model), *adapter, *lengths)["output_tokens"] == 4
    choice = ModelChoice(str(model), None, {"adapter": str(tmp_path / "adapter"), "device": "cpu"})
    assert load_for_bench(choice).tokenizer_of == tmp_path / "adapter"
    several = bench("throughput", "--model", str(model), "--set", "engine.adapters={a: b}", *lengths)
    assert several.exit_code == 2 and "engine.adapters: one model is measured" in several.stderr
    missing = bench("throughput", "--model", str(model), "--set", "engine.adapter=./nowhere", *lengths)
    assert missing.exit_code == 1 and "engine.adapter: no such directory" in missing.stderr


def test_throughput_of_a_shape_needs_no_weights_and_has_the_names_of_the_vllm_script() -> None:
    facts = facts_of(
        *("throughput", "--shape", "llama-20m", "--input-len", "6-9", "--output-len", "3", "--num-requests", "4"),
        *("--shared-prefix", "20", "--max-model-len", "64", "--max-num-seqs", "4"),
    )
    names = "engine shape dtype kv input_len output_len shared_prefix requests load_s wall_s input_tokens output_tokens"
    assert facts.keys() >= {*names.split(), "output_tok_s", "total_tok_s"}
    assert (facts["engine"], facts["shape"], facts["input_len"]) == ("bulkrun", "llama-20m", "6-9")
    assert facts["shared_prefix"] == 20
    assert facts["output_tokens"] == 12 and 4 * 26 <= facts["input_tokens"] <= 4 * 29


def test_batching_compares_the_policies_on_the_same_requests(model: str) -> None:
    facts = facts_of("batching", "--model", model, "--num-requests", "12", "--max-num-seqs", "3", "--rounds", "2")
    policies = facts["policies"]
    assert list(policies) == list(facts["positions"]) == ["padded", "padded_outputs", "static", "dynamic", "continuous"]
    assert facts["rounds"] == 2
    for shares in facts["positions"].values():
        causes = ("needed", "prompt_padding", "ended_sequences", "empty_seats", "recomputed")
        assert sum(shares[cause] for cause in causes) == pytest.approx(1, abs=1e-3)
    assert facts["positions"]["padded"]["prompt_padding"] > facts["positions"]["padded_outputs"]["prompt_padding"] == 0
    assert policies["continuous"]["padding_share"] == 0
    assert 0 < policies["static"]["padding_share"] < 1
    assert policies["continuous"]["slot_use"] > policies["static"]["slot_use"]
    assert policies["continuous"]["steps"] < policies["static"]["steps"] <= policies["padded"]["steps"]
    assert all(one["latency_p50_s"] <= one["latency_p99_s"] <= one["wall_s"] for one in policies.values())
    speedup = facts["speedup"]
    product = speedup["no_prompt_padding"] * speedup["no_output_padding"] * speedup["refilling"]
    assert speedup["total"] == pytest.approx(product, rel=0.01)
    assert speedup["total_min"] <= speedup["total_max"]
    assert {len(shares) for shares in facts["timeline"].values()} == {60}


def test_batching_as_a_table_has_a_row_and_a_line_of_the_plot_for_each_policy(model: str) -> None:
    done = bench("batching", "--model", model, "--num-requests", "8", "--max-num-seqs", "2", "--rounds", "1", *SMALL)
    assert done.exit_code == 0
    for policy in ("padded", "padded_outputs", "static", "dynamic", "continuous"):
        assert sum(line.split()[:1] == [policy] for line in done.stdout.splitlines()) >= 3
    assert "by not padding prompts" in done.stdout


def test_batching_with_requests_that_come_one_by_one(model: str) -> None:
    facts = facts_of(
        *("batching", "--model", model, "--num-requests", "6", "--max-num-seqs", "2"),
        *("--arrival", "poisson", "--rate", "100", "--window", "0.01", "--rounds", "1"),
    )
    assert list(facts["policies"]) == ["static", "dynamic", "continuous"]
    assert (facts["arrival"], facts["rate"], facts["speedup"]) == ("poisson", 100, None)


@pytest.fixture(scope="module")
def roofline(model: str) -> dict[str, Any]:
    lengths = ("--input-len", "9", "--output-len", "8", "--num-requests", "12", "--max-num-seqs", "3")
    return facts_of("roofline", "--model", model, *lengths)


def test_roofline_reports_shares_that_follow_from_its_own_rates(roofline: dict[str, Any]) -> None:
    assert roofline["gemm_tflop_s"] > 0 and roofline["read_gb_s"] > 0
    assert roofline["steps"] >= 32
    assert roofline["serial_s"] == pytest.approx(roofline["gemm_s"] + roofline["kv_s"], abs=2e-4)


def test_roofline_tells_where_the_time_went(roofline: dict[str, Any]) -> None:
    ops = {op["op"] for op in roofline["ops"]}
    products = {"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"}
    assert ops >= {*products, "attention, decode", "rms_norm", "norm_rotary_store", "silu_mul", "sampling", "other"}
    assert sum(op["share_of_time"] for op in roofline["ops"]) == pytest.approx(1, abs=0.01)


LENGTHS = ("--input-len", "9", "--output-len", "8", "--num-requests", "6", "--max-num-seqs", "3")


@pytest.mark.usefixtures("_layer_by_layer")
def test_a_roofline_tells_how_long_the_device_sat_idle_in_the_steps_of_the_run(model: str) -> None:
    idle = facts_of("roofline", "--model", model, *LENGTHS)["idle"]
    assert idle["share"] == pytest.approx(idle["between_steps"] + idle["inside_steps"], abs=2e-4)
    assert 0 < idle["share"] < 1 and idle["slowdown"] > 0


@pytest.mark.skipif(compiled_ops().library is None, reason="layers run one by one on this machine")
def test_no_idle_share_is_told_of_steps_that_tracing_takes_apart(roofline: dict[str, Any]) -> None:
    assert roofline["idle"] is None


@pytest.mark.usefixtures("_layer_by_layer")
def test_roofline_as_a_table_has_a_row_for_an_op_and_says_the_idle_share(model: str) -> None:
    done = bench("roofline", "--model", model, *LENGTHS, *SMALL)
    assert done.exit_code == 0
    assert any(line.split()[:2] == ["attention,", "decode"] for line in done.stdout.splitlines())
    assert "between steps" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput"], "either --model"),
        (["throughput", "--model", "x", "--shape", "llama-20m"], "either --model"),
        (["throughput", "--model", "bundled:tiny", "--dataset", "d", "--input-len", "3"], "leave out --input-len"),
        (["throughput", "--model", "bundled:tiny", "--input-len", "x"], "--input-len 'x': not a length"),
        (["throughput", "--model", "bundled:tiny", "--set", "engine.max_num_sqs=3"], "did you mean max_num_seqs"),
        (["throughput", "--model", "bundled:tiny", "--set", "run.limit=3"], "takes the engine's keys only"),
        (["throughput", "--model", "bundled:tiny"], "1024 + 512 tokens are above max_model_len 1024"),
        (["throughput", "--shape", "llama-20m", "--set", "engine.adapter=x"], "random weights of load_format: dummy"),
        (["batching", "--model", "bundled:tiny", "--set", "engine.batching=static"], "every policy is measured here"),
        (["batching", "--model", "bundled:tiny", "--set", "engine.enable_prefix_caching=true"], "it is off here"),
        (["batching", "--model", "bundled:tiny", "--rate", "3"], "--rate goes with --arrival poisson"),
        (["batching", "--model", "bundled:tiny", "--arrival", "poisson"], "needs --rate"),
        (["batching", "--model", "bundled:tiny", "--num-requests", "4"], "all fit into one batch"),
        (["batching", "--model", "bundled:tiny", "--arrival", "poisson", "--rate", "nan"], "--rate nan"),
        (
            ["batching", "--model", "bundled:tiny", "--arrival", "poisson", "--rate", "1e-300"],
            "less than one request a",
        ),
        (["batching", "--model", "bundled:tiny", "--window", "nan"], "engine.batching_window_s: NaN is not a finite"),
        (["batching", "--model", "bundled:tiny", "--window", "inf"], "engine.batching_window_s"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_fix(arguments: list[str], message: str) -> None:
    refused = bench(*arguments)
    assert refused.exit_code == 2 and message in refused.stderr and refused.stdout == ""


@pytest.mark.parametrize("command", ["throughput", "roofline"])
def test_lengths_that_the_model_has_not_are_refused_before_it_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMEngine, "from_model_dir", lambda *_, **__: pytest.fail("weights were read"))
    refused = bench(command, "--model", "bundled:tiny")
    assert refused.exit_code == 2
    assert "1024 + 512 tokens are above max_model_len 1024; give a shorter --input-len or --outp" in refused.stderr
    assert "shorter --shared-prefix, --in" in bench(command, "--model", "bundled:tiny", "--shared-prefix", "9").stderr


def test_a_benchmark_may_be_named_as_an_option(tmp_path: Path) -> None:
    missing = str(tmp_path / "no-model")
    assert bench("--roofline", "--model", missing).stderr == bench("roofline", "--model", missing).stderr != ""


@pytest.mark.parametrize("command", ["throughput", "roofline"])
def test_a_dataset_is_looked_at_before_a_model_is_loaded(command: str, tmp_path: Path) -> None:
    dataset = tmp_path / "prompts.jsonl"
    dataset.write_text('{"prompt": "\\ud800", "max_tokens": 1}\n')
    refused = bench(command, "--model", "nowhere", "--dataset", str(dataset))
    assert refused.exit_code == 2 and f"{dataset}:1: a row is" in refused.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_said_in_one_line() -> None:
    sizes = ("--input-len", "9", "--output-len", "2")
    refused = bench("throughput", "--model", "bundled:tiny", "--device", "cuda", *sizes)
    assert refused.exit_code == 2 and refused.stderr.startswith("error: engine.device: cuda, but torch ")
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
@pytest.mark.parametrize("command", ["throughput", "roofline"])
def test_8_bits_are_told_where_they_were_asked_for(model: str, command: str, quantization: str) -> None:
    sizes = ("--input-len", "9", "--output-len", "2", "--num-requests", "2")
    facts = facts_of(command, "--model", model, "--kv-cache-dtype", "fp8", "--quantization", quantization, *sizes)
    assert (facts["dtype"], facts["kv"], facts["quantization"]) == ("float32", "fp8", quantization)
