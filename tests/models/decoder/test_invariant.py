"""Models made batch-invariant: the right logits, the same bits in any chunks, and refused by name where impossible."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
import torch

from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.decoder.invariant import InvariantModel, refuse_invariance
from bulkrun.ops.cpu.panel_linear import can_pack_panels
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits, tolerance_of
from tests.models.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model

DENSE = [
    "llama_whole_panels",
    "llama_biases",
    "qwen3_tied",
    "mistral_sliding",
    "gemma2",
    "gemma3",
    "olmo2",
    "phi3_longrope",
    "granite",
]
SEQUENCES = [[3 + (7 * n + k) % (VOCAB_SIZE - 3) for n in range(length)] for k, length in enumerate((150, 33, 61, 2))]
PROMPT_LENS = [140, 33, 20, 1]


@pytest.mark.parametrize(
    "variant",
    [
        *DENSE,
        "qwen3_moe",
        "qwen3_moe_whole_panels",
        "qwen3_5",
        "qwen3_5_moe",
        "lfm2_biases",
        "lfm2_moe",
        "lfm3",
        "granite_h",
        "granite_h_moe",
        "nemotron_h_moe",
        "qwen3_next",
        "mixtral",
        "gpt_oss",
        "gpt_oss_whole_panels",
        "gemma3n",
        "gemma3n_whole_panels",
        "gemma4",
        "gemma4_moe",
        "olmo_hybrid",
        "deepseek_v2_lite",
        "minicpm3",
        "cohere_qk_norm",
        "apertus",
        "afmoe",
        "cohere2_moe",
        "gpt_neox",
        "falcon",
        "olmo_limit",
        "stablelm_beside",
        "kimi_linear",
        "granite_swa",
        "jamba",
        "mamba",
        "falcon_mamba",
    ],
)
def test_logits_equal_transformers_and_have_the_same_bits_in_any_chunks(tmp_path: Path, variant: str) -> None:
    model = load_model(save_tiny_model(tmp_path, variant), dtype=torch.float32, device="cpu", deterministic=True)
    oracle = make_tiny_model(variant)
    first = forced_logits(model, SEQUENCES, PROMPT_LENS, seed=0)
    for tokens, logits in zip(SEQUENCES, first, strict=True):
        with torch.no_grad():
            expected = oracle(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(logits, expected, atol=tolerance_of(variant), rtol=2e-4)
    again = forced_logits(model, SEQUENCES, PROMPT_LENS, seed=1, block_size=16)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("qwen3_5", {"linear_value_head_dim": 20, "linear_key_head_dim": 18}),
        ("mamba", {"intermediate_size": 36, "state_size": 5}),
        ("falcon_mamba", {"intermediate_size": 36, "state_size": 5}),
    ],
)
@pytest.mark.parametrize("has_compiler", [True, False])
def test_states_that_are_not_compiled_have_the_same_bits_beside_few_and_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_compiler: bool, variant: str, sizes: dict[str, int]
) -> None:
    """Values of 20 dimensions, or 36 channels, fill no vectors; those of 24 sequences fill some."""
    if not has_compiler:
        monkeypatch.setattr("bulkrun.ops.dispatch.library", lambda: None)
    path = save_tiny_model(tmp_path, variant, **sizes)
    model = load_model(path, dtype=torch.float32, device="cpu", deterministic=True)
    sequences = [[3 + (7 * n + k) % (VOCAB_SIZE - 3) for n in range(12 + k)] for k in range(24)]
    together = forced_logits(model, sequences, [9 + k for k in range(24)])
    for tokens, logits in list(zip(sequences, together, strict=True))[::5]:
        assert torch.equal(forced_logits(model, [tokens], [9], seed=1)[0], logits)


def test_experts_of_which_one_matrix_only_fits_whole_panels(tmp_path: Path) -> None:
    """Twice the experts' width is a multiple of 32, the width is not."""
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
    path = save_tiny_model(tmp_path, "mixtral", **sizes)
    model = load_model(path, dtype=torch.float32, device="cpu", deterministic=True)
    oracle = make_tiny_model("mixtral", **sizes)
    found = forced_logits(model, SEQUENCES, PROMPT_LENS, seed=0)
    for tokens, logits in zip(SEQUENCES, found, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(logits, oracle(torch.tensor([tokens])).logits[0], atol=2e-4, rtol=2e-4)


# four of the last five have routers in float32
@pytest.mark.parametrize(
    "variant",
    ["llama", "qwen3_moe_whole_panels", "gemma3n_whole_panels", "minicpm3", "cohere_qk_norm", "apertus", "starcoder2",
     "deepseek_v2_lite", "jamba", "falcon_mamba", "glm4_moe", "nemotron_h_moe", "minimax_m2",
     "llama4"],
)  # fmt: skip
def test_bfloat16_logits_have_the_same_bits_in_any_chunks(tmp_path: Path, variant: str) -> None:
    model = load_model(save_tiny_model(tmp_path, variant), dtype=torch.bfloat16, device="cpu", deterministic=True)
    results = [forced_logits(model, SEQUENCES, PROMPT_LENS, seed=seed) for seed in range(3)]
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "variant", ["llama_whole_panels", "qwen3_5_whole_panels", "jamba_whole_panels", "mamba_whole_panels"]
)
def test_layers_over_panels_run_as_one_call_with_the_bits_of_any_chunks(
    tmp_path: Path, variant: str, dtype: torch.dtype
) -> None:
    if not can_pack_panels(torch.empty(32, 32, dtype=dtype)):
        pytest.skip(f"this processor has no panels of {dtype}")
    path = save_tiny_model(tmp_path, variant)
    model = load_model(path, dtype=dtype, device="cpu", deterministic=True)
    assert isinstance(model, InvariantModel) and model.model.layer_stack is not None
    results = [forced_logits(model, SEQUENCES, PROMPT_LENS, seed=seed) for seed in range(3)]
    assert all(torch.equal(one, other) for result in results for one, other in zip(result, results[0], strict=True))
    normal = forced_logits(load_model(path, dtype=dtype, device="cpu"), SEQUENCES, PROMPT_LENS)
    assert all(torch.equal(one, other) for one, other in zip(normal, results[0], strict=True))


def test_layers_that_would_be_copied_are_not_one_call(tmp_path: Path) -> None:
    """Wide steps of theirs go op by op, whose bits are others."""
    model = load_model(
        save_tiny_model(tmp_path, "llama_head_dim_80"), dtype=torch.float32, device="cpu", deterministic=True
    )
    assert isinstance(model, InvariantModel) and model.model.layer_stack is None


def test_a_processor_whose_products_depend_on_the_place_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("bulkrun.ops"), "is_invariant_linear", lambda panel, dtype: False)
    with pytest.raises(ModelError, match=r"depend on a row's place in its batch; try another engine.dtype"):
        load_model(save_tiny_model(tmp_path), dtype=torch.float32, device="cpu", deterministic=True)


def test_the_general_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel runs through transformers' own code.*leave the key out"):
        load_model(save_tiny_model(tmp_path, "gpt2"), dtype=torch.float32, device="cpu", deterministic=True)


def test_mixtures_of_experts_on_a_gpu_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save_tiny_model(tmp_path, "qwen3_moe"))
    refuse_invariance(config, torch.device("cpu"), None)
    with pytest.raises(ModelError, match=r"Qwen3MoeForCausalLM.*on a CPU only"):
        refuse_invariance(config, torch.device("cuda"), None)


def test_quantized_weights_are_refused(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(save_tiny_model(tmp_path))
    with pytest.raises(UsageError, match=r"engine.quantization fp8 depend on the batch; leave one of the two keys out"):
        refuse_invariance(config, torch.device("cpu"), "fp8")
