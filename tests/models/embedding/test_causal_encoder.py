"""A decoder over a scratch cache: what earlier steps left there reaches nobody, and steps of any size follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.models.embedding.causal_encoder import CausalEncoder
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.loading.loader import load_model
from bulkrun.ops import AttentionMetadata
from tests.models.tiny_models import VOCAB_SIZE, edit_weights, save_tiny_model

CPU = torch.device("cpu")


def encoder(path: Path, block_size: int = 8) -> CausalEncoder:
    model = load_model(path, dtype=torch.float32, device=CPU, has_head=False)
    return CausalEncoder(model, block_size=block_size)


def texts(*lens: int) -> PackedTexts:
    return PackedTexts.of([[(3 + 5 * place + length) % VOCAB_SIZE for place in range(length)] for length in lens], CPU)


@torch.inference_mode()
def test_what_earlier_steps_left_reaches_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A masked-out key must be a finite number (`KVCache`), though no op of today reads one: 0 * NaN is NaN."""
    one = encoder(save_tiny_model(tmp_path, "mistral_sliding"))
    expected = one(texts(1, 1, 9, 30))
    cache, model = one._cache._cache, one.model
    assert cache is not None
    for tensor in (cache.k[0], cache.v[0]):
        tensor[1:].fill_(float("nan"))

    def looked_at(ids: torch.Tensor, positions: torch.Tensor, kv: KVCache, meta: AttentionMetadata, kept: Any) -> Any:
        by_slot = kv.k[0].flatten(0, 1).flatten(1), kv.v[0].flatten(0, 1).flatten(1)
        read_along = torch.ones(len(by_slot[0]), dtype=torch.bool)
        read_along[meta.slot_mapping_T] = False
        assert all(slots[read_along].isfinite().all() for slots in by_slot)
        return model(ids, positions, kv, meta, kept)

    monkeypatch.setattr(one, "model", looked_at)
    assert torch.equal(one(texts(1, 1, 9, 30)), expected)


@torch.inference_mode()
def test_blocks_belong_to_one_text_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = encoder(save_tiny_model(tmp_path), block_size=4)
    seen: list[AttentionMetadata] = []
    monkeypatch.setattr(one, "model", lambda ids, positions, kv, meta, kept: seen.append(meta))
    one(texts(1, 4, 5, 9))
    meta = seen[0]
    assert meta.block_tables_SM.tolist() == [[1, 0, 0], [2, 0, 0], [3, 4, 0], [5, 6, 7]]
    assert meta.slot_mapping_T.tolist() == [4, *range(8, 12), *range(12, 17), *range(20, 29)]
    assert meta.cu_seqlens_q.tolist() == [0, 1, 5, 10, 19]
    assert meta.context_lens_S.tolist() == [1, 4, 5, 9]
    assert (meta.num_decode_seqs, meta.max_query_len, meta.max_context_len) == (1, 9, 9)


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
