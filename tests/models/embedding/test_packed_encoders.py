"""Encoders over packed texts, as a GPU runs them: transformers' hidden states for each text alone, or its own code.

Here the references of the ops run; `tests/engine/test_embedding_on_gpu.py` runs the kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.errors import ModelError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.embedding import encoder_loader, packed_encoder, packed_transformer
from bulkrun.models.embedding.encoder_loader import fast_encoder
from bulkrun.models.embedding.packed_encoder import PackedEncoder
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.packed_transformer import ATTENTION_NAME, PackedTransformer
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.embedding.text_encoder import TextEncoder
from bulkrun.models.general.attention_interface import Asked
from bulkrun.models.loading.load_options import LoadOptions
from tests.models.tiny_encoders import ENCODERS, hidden_states, save_tiny_classifier, save_tiny_encoder
from tests.models.tiny_models import VOCAB_SIZE

CPU = torch.device("cpu")
LENS = (1, 1, 2, 7, 16, 17, 30, 96)
CLOSE = {"rtol": 1e-5, "atol": 2e-5}
AS_TRANSFORMERS = ("modernbert", "gemma3_both_ways", "qwen2_both_ways")  # whose own layers run


@pytest.fixture(autouse=True)
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for compile_it in ("compile_encoder", "compile_modernbert"):
        monkeypatch.setattr(encoder_loader, compile_it, lambda *_: None)
    for module in (packed_encoder, packed_transformer):
        monkeypatch.setattr(module, "uses_triton", lambda _: True)


def load(path: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> TextEncoder:
    config = EmbeddingConfig.from_dir(path).model
    return encoder_loader.load_encoder(path, config, LoadOptions(dtype=dtype, device=CPU, **settings))


def texts(lens: tuple[int, ...] = LENS) -> list[list[int]]:
    """With tokens that pad a batch, id 0 of some models and 1 of others, in the middle of a text."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lens]
    made[3][2:4] = [1, 0]
    return made


@torch.inference_mode()
def states(encoder: TextEncoder, given: list[list[int]], kept: torch.Tensor | None = None) -> torch.Tensor:
    return encoder(PackedTexts.of(given, CPU), kept).float()


@pytest.mark.parametrize("variant", ENCODERS)
def test_hidden_states_are_those_of_transformers_for_each_text_alone(variant: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, variant)
    encoder = load(path)
    kind = PackedTransformer if variant.removesuffix("_in_panels") in AS_TRANSFORMERS else PackedEncoder
    assert type(encoder) is (PaddedEncoder if variant == "gpt2" else kind)  # which does not look both ways
    expected = torch.cat(hidden_states(path, texts()))
    torch.testing.assert_close(states(encoder, texts()), expected, **CLOSE)
    last = torch.tensor(LENS).cumsum(0) - 1
    torch.testing.assert_close(states(encoder, texts(), last), expected[last], **CLOSE)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("gemma3_both_ways", {"sliding_window": 260}),
        ("gemma3_both_ways", {"sliding_window": 1200}),
        ("modernbert", {"local_attention": 128}),
        ("qwen2_both_ways", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
    ],
)
def test_windows_end_where_the_models_do(variant: str, changes: dict[str, Any], tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, variant, max_position_embeddings=700, **changes)
    given, encoder = texts((1, 1, 7, 40, 96, 257, 600)), load(path)
    assert isinstance(encoder, PackedTransformer) != (variant == "qwen2_both_ways")  # one token farther
    torch.testing.assert_close(states(encoder, given), torch.cat(hidden_states(path, given)), **CLOSE)


def test_a_window_that_ends_elsewhere_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "modernbert", max_position_embeddings=700, local_attention=128)
    attend = packed_transformer._packed_attention

    def one_farther(module: torch.nn.Module, asked: Asked) -> torch.Tensor:
        return attend(module, asked._replace(sliding_window=asked.sliding_window and asked.sliding_window + 1))

    monkeypatch.setattr(packed_transformer, "_packed_attention", one_farther)
    assert isinstance(load(path), PaddedEncoder)


def test_a_window_that_no_text_of_the_check_reaches_is_not_believed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(packed_transformer, "_LONGEST_CHECK", 40)
    assert isinstance(load(save_tiny_encoder(tmp_path, "modernbert", local_attention=100)), PaddedEncoder)


@pytest.mark.parametrize("more", [{"soft_cap": 50.0}, {"has_mask": True}, {"sinks_H": torch.zeros(3)}], ids=str)
def test_attention_that_is_asked_for_more_is_refused(more: dict[str, Any]) -> None:
    """A soft cap far above the scores would not show in numbers."""
    states = torch.zeros(5, 3, 8)
    asked = Asked(states, states, states, 1.0, None, None, False, None, {})._replace(**more)
    with pytest.raises(ModelError, match="wants a mask, a soft cap or sinks"):
        packed_transformer._packed_attention(torch.nn.Module(), asked)


@pytest.mark.parametrize("variant", ["bert", "mpnet", "modernbert"])
def test_in_half_precision_they_are_near(variant: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, variant)
    encoder, expected = load(path, torch.bfloat16), torch.cat(hidden_states(path, texts()))
    assert not isinstance(encoder, PaddedEncoder) and encoder.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(states(encoder, texts()), expected).min() > 0.99


@pytest.mark.parametrize("variant", ["bert", "distilbert", "modernbert", "gemma3_both_ways"])
def test_in_8_bits_they_are_those_of_padded_batches(
    variant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = save_tiny_encoder(tmp_path, variant)
    packed = states(load(path, quantization="fp8"), texts())
    for module in (packed_encoder, packed_transformer):
        monkeypatch.setattr(module, "uses_triton", lambda _: False)
    padded = load(path, quantization="fp8")
    assert isinstance(padded, PaddedEncoder)
    # where a sum falls to the other side of a rounding, it is one of 8 bits
    assert torch.nn.functional.cosine_similarity(packed, states(padded, texts())).min() > 0.999


def test_tokens_of_pairs_have_their_types(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    config = EmbeddingConfig.from_dir(path).model
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    pair = [2, 17, 9, 30, 31, 9]
    with torch.inference_mode():
        [expected] = model(torch.tensor([pair]), token_type_ids=torch.tensor([[0, 0, 0, 1, 1, 1]])).last_hidden_state
    encoder = fast_encoder(PaddedEncoder(model, config, pair_separator=9), None)
    assert isinstance(encoder, PackedEncoder)
    torch.testing.assert_close(states(encoder, [[5, 6], pair])[2:], expected, **CLOSE)


def test_attention_of_another_kind_stays_as_it_is(tmp_path: Path) -> None:
    """DeBERTa's adds what it knows of positions: no function of queries, keys and values."""
    path = save_tiny_classifier(tmp_path, "deberta_v2")
    model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    own = model.config._attn_implementation
    padded = PaddedEncoder(model, EmbeddingConfig.from_dir(path).model)
    assert fast_encoder(padded, None) is padded
    assert model.config._attn_implementation == own != ATTENTION_NAME
    torch.testing.assert_close(states(padded, texts()), torch.cat(hidden_states(path, texts())), **CLOSE)
