"""The ceilings against the project's table for one H200 (790 TFLOP/s, 4.3 TB/s, bf16), and against counting by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.errors import UsageError
from bulkrun.launch.bench.ceilings import FLOPS_PER_PAIR, DeviceRates, ModelCost, attended, ceilings
from bulkrun.launch.bench.roofline import sustained_shares
from bulkrun.launch.bench.shapes import write_shape
from bulkrun.launch.bench.workload import Work
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.windows import Chunks, Window
from tests.models.tiny_models import known, make_tiny_model, save_tiny_model

H200 = DeviceRates(790e12, 4.3e12)
NOT_MULTIPLIED = ("bias", "sinks", "scale", "tokens_per_layer", "act_fn")


def _cost(shape: str, tmp_path: Path) -> ModelCost:
    return ModelCost.of(ModelConfig.from_dir(write_shape(shape, tmp_path, dtype="bfloat16", max_model_len=4096)), 2)


@pytest.mark.parametrize(
    ("shape", "num_input", "num_output", "nanoflow", "maximum", "serial"),
    [
        ("llama-3.1-8b", 2048, 128, 49_191, 54_143, 44_931),
        ("llama-3.1-8b", 1024, 512, 49_191, 53_699, 31_618),
        ("llama-3.1-8b", 1024, 1024, 49_191, 42_717, 23_572),
        ("llama-3.1-8b", 128, 1024, 49_191, 51_992, 27_342),
        ("qwen3-8b", 1024, 512, 48_227, 53_525, 30_017),
        ("qwen3-0.6b", 1024, 1024, 662_769, 48_819, 45_263),
    ],
)
def test_the_ceilings_of_public_shapes_are_those_of_the_table(
    shape: str, num_input: int, num_output: int, nanoflow: int, maximum: int, serial: int, tmp_path: Path
) -> None:
    limits = ceilings(_cost(shape, tmp_path), [Work([1] * num_input, num_output)] * 3, H200)
    tokens = 3 * (num_input + num_output)
    # the table takes n^2 / 2 pairs where there are n (n + 1) / 2
    assert tokens / limits.nanoflow_s == pytest.approx(nanoflow, rel=2e-3)
    assert tokens / limits.max_s == pytest.approx(maximum, rel=2e-3)
    assert tokens / limits.serial_s == pytest.approx(serial, rel=2e-3)


@pytest.mark.parametrize(
    "variant",
    known(
        [
            "llama_tied",
            "qwen3",
            "mixtral",
            "gpt_oss",
            "gemma3n",
            "gemma4",
            "gemma4_moe",
            "gemma4_unified_whole_panels",
            "deepseek_v3",
            "minicpm3",
            "cohere2",
            "apertus",
            "afmoe",
            "gpt_neox",
            "llama4",
            "llama4_maverick",
        ]
    ),
)
def test_the_parameters_counted_are_the_models_own(variant: str, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save_tiny_model(tmp_path, variant))
    assert isinstance(config, DecoderConfig)
    weights = {name: p.numel() for name, p in make_tiny_model(variant).named_parameters() if "norm" not in name}
    expected = sum(size for name, size in weights.items() if not any(part in name for part in NOT_MULTIPLIED))
    if config.moe is not None:  # a token goes to some of the experts
        experts = sum(size for name, size in weights.items() if ".experts." in name and "bias" not in name)
        expected -= experts - experts * config.moe.num_experts_per_tok // config.moe.num_experts
    assert ModelCost.of(config, 2).num_parameters == expected


@pytest.mark.parametrize("name", ["llama-4-scout", "llama-4-maverick"])
def test_a_token_of_llama_4_meets_as_many_parameters_as_its_name_says(name: str, tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write_shape(name, tmp_path, dtype="bfloat16", max_model_len=8192))
    assert round(ModelCost.of(config, 2).num_parameters / 1e9) == 17


def _sees(query: int, key: int, window: Window | None) -> bool:
    if isinstance(window, Chunks):
        return query // window.size == key // window.size
    return window is None or query - key < window


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50, Chunks(1), Chunks(6), Chunks(20)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 8, 20])
def test_attended_pairs_are_those_of_a_causal_mask_with_a_window(num_tokens: int, window: Window | None) -> None:
    by_hand = sum(1 for query in range(num_tokens) for key in range(query + 1) if _sees(query, key, window))
    assert attended(num_tokens, window) == by_hand


@pytest.mark.parametrize(
    ("shape", "states_bytes", "kv_bytes"),
    [  # a state of floats and 3 inputs of a convolution in each layer; in the second some layers attend
        ("falcon-mamba-7b", 64 * (8192 * 16 * 4 + 8192 * 3 * 2), 0),
        ("nemotron-nano-9b-v2", 27 * (128 * 80 * 128 * 4 + (128 * 80 + 2 * 8 * 128) * 3 * 2), 4 * 2 * 8 * 128 * 2),
    ],
)
def test_states_are_read_and_written_for_each_output_token(
    shape: str, states_bytes: int, kv_bytes: int, tmp_path: Path
) -> None:
    limits = ceilings(_cost(shape, tmp_path), [Work([1] * 10, 5)], DeviceRates(1.0, 1.0))
    assert limits.kv_s == 5 * 2 * states_bytes + (11 + 12 + 13 + 14 + 15) * kv_bytes


def test_of_a_latent_the_keys_and_values_are_counted_that_it_stands_for_and_its_own_bytes(tmp_path: Path) -> None:
    """16 heads, whose keys have 128 + 64 dimensions and whose values 128; 512 + 64 numbers are kept of a token."""
    (layer, *others) = _cost("deepseek-v2-lite", tmp_path).attention
    assert FLOPS_PER_PAIR * layer.width == 16 * (2 * (128 + 64) + 2 * 128)
    assert layer.kv_bytes == 2 * (512 + 64) and set(others) == {layer}


def test_a_model_of_the_general_path_has_no_roofline() -> None:
    config = ModelConfig(
        architecture="GPT2LMHeadModel",
        vocab_size=10,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=10,
        eos_token_ids=(),
        dtype="float32",
    )
    with pytest.raises(UsageError, match="GPT2LMHeadModel runs through transformers"):
        ModelCost.of(config, 2)


def test_shares_of_what_products_keep_up_go_by_that_rate_alone(tmp_path: Path) -> None:
    cost, work = _cost("llama-3.1-8b", tmp_path), [Work([1] * 1024, 256)]
    kept_up = ceilings(cost, work, H200._replace(gemm_flop_s=680e12))
    shares = sustained_shares(cost, work, H200._replace(sustained_flop_s=680e12), 2 * kept_up.serial_s)
    assert shares["sustained_gemm_tflop_s"] == 680 and shares["share_of_sustained_serial"] == 0.5
    assert shares["share_of_sustained_nanoflow"] == pytest.approx(0.5 * kept_up.nanoflow_s / kept_up.serial_s, abs=1e-4)
    assert sustained_shares(cost, work, H200, 1.0) == {}  # not measured
