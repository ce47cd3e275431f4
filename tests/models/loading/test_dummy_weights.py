"""Random weights: from config.json alone, the right shapes, the same on every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bulkrun.models.decoder.decoder import Decoder
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import save_tiny_model


def load_dummy(path: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    model = load_model(path, dtype=dtype, device="cpu", load_format="dummy")
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("variant", ["llama_tied", "gemma3", "mixtral", "gpt_oss", "phi3", "olmo2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_without_weights_runs_and_gives_numbers(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, variant)
    (path / "model.safetensors").unlink()
    (logits,) = forced_logits(load_dummy(path, dtype), [[5, 9, 77, 3, 8]], [4])
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_two_loads_are_the_same_model_and_every_weight_is_filled(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe")
    first, second = load_dummy(path), load_dummy(path)
    for (name, ours), other in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(ours, other), name
        assert ours.std() > 0 or "norm" in name, name
    stored = load_model(path, dtype=torch.float32, device="cpu")
    assert not torch.equal(stored.lm_head.weight, first.lm_head.weight)


def test_norms_and_scales_of_layers_are_one(tmp_path: Path) -> None:
    """Noise in their place would make less of the stream with each layer."""
    model = load_dummy(save_tiny_model(tmp_path, "gemma4"))
    endings = ("norm.weight", "attention_out.weight", "mlp_out.weight", "input_out.weight", ".scale")
    ones = {name: weight for name, weight in model.named_parameters() if name.endswith(endings)}
    assert {ending for ending in endings for name in ones if name.endswith(ending)} == {*endings}
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in ones.values())
