"""Whole models through the kernels: the same logits as through the references, chunks, decode and padding included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bulkrun.ops import dispatch
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import save_tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # in exp, where a sigmoid becomes zero
]


@pytest.mark.parametrize(
    "variant",
    [
        "mistral_sliding",
        "qwen3",
        "gemma2",
        "gemma3",
        "gemma3n",
        "gemma4",
        "gemma4_moe",
        "olmo2",
        "phi3_partial_rotary",
        "smollm3",
        "qwen3_5",
        "deepseek_v3",
    ],
)
def test_a_decoder_has_the_logits_of_the_references(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_model(tmp_path, variant)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    sequences, prompt_lens = [[5, 9, 80, 3, 17, 44, 2, 60, 61, 7], [30] * 4], [7, 3]
    expected = forced_logits(model, sequences, prompt_lens)
    monkeypatch.setattr(dispatch, "uses_triton", lambda tensor: True)
    ours = forced_logits(model, sequences, prompt_lens)
    for one, other in zip(ours, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=2e-4)
