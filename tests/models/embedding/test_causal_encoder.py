"""A decoder over a scratch cache: what earlier steps left there reaches nobody, and steps of any size follow."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bulkrun.models.embedding.causal_encoder import CausalEncoder
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.loading.loader import load_model
from tests.models.tiny_models import VOCAB_SIZE, edit_weights, save_tiny_model

CPU = torch.device("cpu")


def encoder(path: Path, block_size: int = 8) -> CausalEncoder:
    model = load_model(path, dtype=torch.float32, device=CPU, has_head=False)
    return CausalEncoder(model, block_size=block_size)


def texts(*lens: int) -> PackedTexts:
    return PackedTexts.of([[(3 + 5 * place + length) % VOCAB_SIZE for place in range(length)] for length in lens], CPU)


@pytest.mark.parametrize("variant", ["llama", "mistral_sliding", "gemma2", "gpt_oss"])
@torch.inference_mode()
def test_what_earlier_steps_left_reaches_nobody(variant: str, tmp_path: Path) -> None:
    """Not even where it is no number: masked keys are multiplied with zero, and that gives none either."""
    one = encoder(save_tiny_model(tmp_path, variant))
    expected = one(texts(1, 1, 9, 30))
    cache = one._cache
    assert cache is not None
    for tensor in (cache.k[0], cache.v[0]):
        tensor[1:].fill_(float("nan"))
    assert torch.equal(one(texts(1, 1, 9, 30)), expected)


@torch.inference_mode()
def test_steps_of_all_sizes_follow_one_another(tmp_path: Path) -> None:
    """Alone or beside others: the same up to the rounding of float32 sums."""
    one = encoder(save_tiny_model(tmp_path, "qwen3"))
    crowd = one(texts(5, 17, 40)).split((5, 17, 40))
    one.free_scratch()
    for length, expected in zip((5, 17, 40), crowd, strict=True):
        torch.testing.assert_close(one(texts(length)), expected, rtol=1e-5, atol=2e-5)


@torch.inference_mode()
def test_kept_tokens_are_those_of_the_whole(tmp_path: Path) -> None:
    one = encoder(save_tiny_model(tmp_path, "qwen3"))
    kept = torch.tensor([0, 4, 21])
    torch.testing.assert_close(one(texts(5, 17), kept), one(texts(5, 17))[kept], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_head_is_never_loaded(tie_word_embeddings: bool, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", tie_word_embeddings=tie_word_embeddings)
    edit_weights(path, lm_head__weight=torch.zeros(3, 3))
    model = load_model(path, dtype=torch.float32, device=CPU, has_head=False)
    assert sum(p.numel() for p in model.parameters() if p.shape[0] == VOCAB_SIZE) == VOCAB_SIZE * 48
