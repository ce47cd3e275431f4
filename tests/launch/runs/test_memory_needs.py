"""What a plan says of memory: the model's files, and keys and values of its rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bulkrun.cli.foresight import _of_memory
from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.job.plan.report import PlanCounters
from bulkrun.launch.bench.shapes import write_shape
from bulkrun.launch.runs.memory_needs import MemoryNeeds
from bulkrun.models.config.model_config import ModelConfig

COUNTERS = PlanCounters(
    rows=12, prompt_tokens=1000, expected_output_tokens=9 * 2 * 50, duplicate_prompts=1, errors={"bad_input": 2}
)
TOKEN = 2 * 32 * 8 * 128  # Llama 3.1 8B's numbers a token


def needs(folder: Path, model: ModelConfig | None = None, *, generates: bool = True, **engine: Any) -> MemoryNeeds:
    model = model or ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=128_256, hidden_size=4096, intermediate_size=14_336, num_layers=32,
        num_heads=32, num_kv_heads=8, head_dim=128, max_position_embeddings=131_072, eos_token_ids=(), dtype="bfloat16",
    )  # fmt: skip
    spec = SimpleNamespace(
        generates=generates, sampled=SimpleNamespace(generations=2), engine=EngineSpec.model_validate(engine)
    )
    prepared: Any = SimpleNamespace(spec=spec, model=model, model_dir=folder)
    return MemoryNeeds.of(prepared, COUNTERS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    return tmp_path


def test_a_row_is_as_long_as_the_mean_of_those_that_run(folder: Path) -> None:
    """100 prompt tokens of each of 10 rows; 50 output tokens of each of two samples of 9 that differ."""
    assert needs(folder) == MemoryNeeds(1234, "bfloat16", 2 * TOKEN, 2 * TOKEN * 150)


@pytest.mark.parametrize(
    ("engine", "dtype", "itemsize"),
    [
        ({"dtype": "float32"}, "float32", 4),
        ({"kv_cache_dtype": "fp8"}, "fp8", 1),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "bfloat16", 2),
    ],
)
def test_keys_and_values_are_of_the_dtype_that_the_job_asks_for(
    folder: Path, engine: dict[str, Any], dtype: str, itemsize: int
) -> None:
    found = needs(folder, **engine)
    assert (found.kv_cache_dtype, found.kv_bytes_per_token) == (dtype, itemsize * TOKEN)


def test_a_row_has_a_state_where_layers_keep_one(folder: Path) -> None:
    """That of Qwen3.5-9B: of 24 layers 32 matrices in float32 and three inputs; 8 layers have keys and values."""
    model = ModelConfig.from_dir(write_shape("qwen3.5-9b", folder, dtype="bfloat16", max_model_len=100))
    state, token = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2), 2 * 2 * 8 * 4 * 256
    found = needs(folder, model)
    assert found == MemoryNeeds(1234, "bfloat16", token, state + token * 150, state)
    assert _of_memory(found).endswith("kB a token, at most 56.4 MB a row on average, 51.5 MB of it a state")
    assert needs(folder, model, kv_cache_dtype="fp8").state_bytes_per_row == state
    assert "state" not in _of_memory(needs(folder))


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    assert needs(tmp_path).weight_bytes is None and needs(tmp_path).kv_bytes_per_token == 2 * TOKEN


def test_random_weights_have_no_files_and_rows_that_are_only_read_keep_nothing(tmp_path: Path, folder: Path) -> None:
    assert needs(tmp_path / "none", load_format="dummy").weight_bytes is None
    assert needs(folder, generates=False) == MemoryNeeds(1234, "bfloat16", None, None)
