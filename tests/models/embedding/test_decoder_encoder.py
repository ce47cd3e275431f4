"""A decoder over a scratch cache: what earlier steps left there reaches nobody, and steps of any size follow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.embedding.decoder_encoder import DecoderEncoder
from bulkrun.models.embedding.embedding_model_loader import load_embedding_model
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.kv_cache import KVCache
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.models.recurrent_state import RecurrentState
from bulkrun.ops import AttentionMetadata
from bulkrun.ops.cpu.layer_stack import can_stack
from bulkrun.ops.cpu.layer_weights import Heads, StackSizes
from bulkrun.ops.cpu.panel_linear import compiles_panels
from bulkrun.settings import EmbeddingArgs, EngineArgs
from tests.models.load import load_model
from tests.models.tiny_encoders import hidden_states, save_tiny_encoder
from tests.models.tiny_models import VOCAB_SIZE, edit_weights, known, save_tiny_model

CPU = torch.device("cpu")


def encoder(path: Path, block_size: int = 8) -> DecoderEncoder:
    model = load_model(path, dtype=torch.float32, device=CPU, has_head=False)
    return DecoderEncoder(model, block_size=block_size)


def load(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> TextEncoder:
    config, args = EmbeddingConfig.from_dir(path), EmbeddingArgs(pooling="mean")
    options = LoadOptions.of(EngineArgs(**settings), dtype, CPU)
    return load_embedding_model(path, config, args, options).encoder


@torch.inference_mode()
def states(one: TextEncoder, given: PackedTexts, kept: torch.Tensor | None = None) -> torch.Tensor:
    return one(given, kept).float().clone()


def skip_unless_stacked(dtype: torch.dtype) -> None:
    sizes = StackSizes(64, 4, 1e-6, 0.25, None, 1.0, "silu", is_layer_norm=False, is_causal=False, dtype=dtype)
    if not can_stack(sizes, dtype, [Heads(2, 16)]):
        pytest.skip("this processor has no such compiled layers")


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


@pytest.mark.parametrize(
    "variant",
    known(
        [
            "qwen3",
            "qwen3_5",
            "lfm2",
            "nemotron_h",
            "falcon_h1",
            "gemma3n",
            "gemma4",
            "olmo_hybrid",
            "minicpm3",
            "cohere2",
            "kimi_linear",
            "gpt_neox",
        ]
    ),
)
@torch.inference_mode()
def test_steps_of_all_sizes_follow_one_another(variant: str, tmp_path: Path) -> None:
    """Alone or beside others: the same up to the rounding of float32 sums."""
    one = encoder(save_tiny_model(tmp_path, variant))
    crowd = one(texts(5, 17, 40)).split((5, 17, 40))
    one.free_scratch()
    for length, expected in zip((5, 17, 40), crowd, strict=True):
        torch.testing.assert_close(one(texts(length)), expected, rtol=1e-5, atol=2e-5)


def test_a_scratch_cache_grows_with_tokens_and_its_states_with_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither makes the other anew: steps come longest texts first, each of more texts than the one before."""
    cache, made = encoder(save_tiny_model(tmp_path, "qwen3_5"))._cache, []
    for owner in (KVCache, RecurrentState):
        allocate = owner.allocate
        monkeypatch.setattr(owner, "allocate", lambda *args, of=allocate, **kw: made.append(args[1]) or of(*args, **kw))
    for lens in ((40,), (13, 14), (7, 7, 8), (1,), (39,), (3, 3, 3)):
        cache.lay_out(texts(*lens))
    assert made == [6, 1, 2, 3], "blocks of 8 with the null block, then rows"


@pytest.mark.parametrize(
    "variant", known(["qwen3", "gemma3n", "gemma4", "gemma4_whole_panels", "minicpm3", "cohere2", "llama4"])
)
@torch.inference_mode()
def test_kept_tokens_are_those_of_the_whole(variant: str, tmp_path: Path) -> None:
    one = encoder(save_tiny_model(tmp_path, variant))
    kept = torch.tensor([0, 4, 21])
    torch.testing.assert_close(one(texts(5, 17), kept), one(texts(5, 17))[kept], rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_a_head_is_never_loaded(tie_word_embeddings: bool, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", tie_word_embeddings=tie_word_embeddings)
    edit_weights(path, lm_head__weight=torch.zeros(3, 3))
    model = load_model(path, dtype=torch.float32, device=CPU, has_head=False)
    assert sum(p.numel() for p in model.parameters() if p.shape[0] == VOCAB_SIZE) == VOCAB_SIZE * 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["gemma3_both_ways_in_panels", "qwen2_both_ways_in_panels"])
def test_decoders_that_look_both_ways_are_compiled(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """A text's bits are its own, in a crowd, with few tokens kept, and in 8 bits."""
    skip_unless_stacked(dtype)
    if not compiles_panels(dtype):
        pytest.skip("without panels, which need AVX-512, steps that are not narrow go through torch")
    path = save_tiny_encoder(tmp_path, variant)
    for quantization in (None, "int8"):
        one = load(path, dtype, quantization=quantization, deterministic=True)
        assert isinstance(one, DecoderEncoder)
        crowd = states(one, texts(1, 1, 7, 40, 96))
        ends = torch.tensor([1, 1, 7, 40, 96]).cumsum(0)
        assert torch.equal(states(one, texts(1, 1, 7, 40, 96), ends - 1), crowd[ends - 1])
        assert all(
            torch.equal(states(one, texts(length)), beside)
            for length, beside in zip((1, 1, 7, 40, 96), crowd.split((1, 1, 7, 40, 96)), strict=True)
        )


@pytest.mark.parametrize(
    ("variant", "window"),
    [
        ("gemma3_both_ways_in_panels", 12),
        ("gemma3_both_ways_in_panels", 260),
        ("gemma3_both_ways_in_panels", 1200),
        ("qwen2_both_ways_in_panels", None),
    ],
)
def test_and_give_the_hidden_states_of_transformers(variant: str, window: int | None, tmp_path: Path) -> None:
    """Windows end within tiles of keys, in earlier and in later ones."""
    skip_unless_stacked(torch.float32)
    changes = {"max_position_embeddings": 700, "sliding_window": window}
    path, lens = save_tiny_encoder(tmp_path, variant, **changes), (1, 1, 7, 40, 96, 257, 600)
    given = [ids.tolist() for ids in texts(*lens).token_ids_T.split(lens)]
    expected = torch.cat(hidden_states(path, given))
    torch.testing.assert_close(states(load(path), texts(*lens)), expected, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("gemma3_both_ways", {}),  # sizes that fill no panels
        ("qwen2_both_ways_in_panels", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_others_run_through_transformers(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, variant, **changes)
    encoder = load(path)
    assert isinstance(encoder, PaddedEncoder)
    given = [ids.tolist() for ids in texts(3, 40).token_ids_T.split((3, 40))]
    torch.testing.assert_close(
        states(encoder, texts(3, 40)), torch.cat(hidden_states(path, given)), rtol=1e-5, atol=2e-5
    )  # fmt: skip
