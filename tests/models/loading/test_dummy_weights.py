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
