"""Batches of similar lengths, and models that transformers' code runs: what they need, and what is found out early."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from bulkrun.errors import ModelError
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.embedding import encoder_loader
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.models.embedding.padded_encoder import FREE_PADDING, MAX_PADDING, PaddedEncoder, similar_lengths
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.settings import LoadFormat
from tests.models.tiny_encoders import ENCODERS, hidden_states, save_tiny_encoder
from tests.models.tiny_models import VOCAB_SIZE, edit_weights


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for compile_it in ("compile_encoder", "compile_modernbert"):
        monkeypatch.setattr(encoder_loader, compile_it, lambda *_: None)


def load(path: Path, dtype: torch.dtype = torch.float32, load_format: LoadFormat = "auto") -> PaddedEncoder:
    config = EmbeddingConfig.from_dir(path).model
    options = LoadOptions(dtype=dtype, device=torch.device("cpu"), load_format=load_format)
    encoder = encoder_loader.load_encoder(path, config, options)
    assert isinstance(encoder, PaddedEncoder)
    return encoder


@given(st.lists(st.integers(1, 500), min_size=1, max_size=60).map(sorted))
def test_batches_hold_every_text_once_and_little_padding(lens: list[int]) -> None:
    batches = list(similar_lengths(lens))
    assert [index for first, end in batches for index in range(first, end)] == list(range(len(lens)))
    for first, end in batches:
        padded = (end - first) * lens[end - 1]
        assert padded - sum(lens[first:end]) <= max(MAX_PADDING * padded, FREE_PADDING)


def test_equal_lengths_share_a_batch() -> None:
    assert list(similar_lengths([9] * 50)) == [(0, 50)]


@pytest.mark.parametrize("padding", [-1, VOCAB_SIZE])
def test_a_batch_is_not_padded_with_a_token_that_the_model_does_not_have(padding: int, tmp_path: Path) -> None:
    path, texts = save_tiny_encoder(tmp_path, "gpt2", pad_token_id=padding), [[5, 6], [7, 8, 9]]
    made = load(path)(PackedTexts.of(texts, torch.device("cpu")))
    torch.testing.assert_close(made, torch.cat(hidden_states(path, texts)), rtol=1e-5, atol=2e-5)


def test_a_head_over_the_first_token_may_be_missing(tmp_path: Path) -> None:
    path, texts = save_tiny_encoder(tmp_path, "bert"), PackedTexts.of([[5, 6], [7, 8, 9]], torch.device("cpu"))
    expected = load(path)(texts)
    edit_weights(path, pooler__dense__weight=None, pooler__dense__bias=None)
    assert torch.equal(load(path)(texts), expected)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("encoder__layer__1__output__dense__weight", None, r"missing keys: encoder\.layer\.1\.output\.dense\.weight"),
        (
            "embeddings__word_embeddings__weight",
            torch.zeros(5, 48),
            r"mismatched keys: .*embeddings\.word_embeddings\.weight",
        ),
    ],
)
def test_other_tensors_may_not(name: str, tensor: torch.Tensor | None, message: str, tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    edit_weights(path, **{name: tensor})
    with pytest.raises(ModelError, match=message):
        load(path)


def test_pickles_are_refused(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only as pickle"):
        load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_looks_at_padding_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    """ConvBERT: its convolutions mix each token with those behind it, padding or not."""
    config = transformers.ConvBertConfig(
        vocab_size=131, hidden_size=48, embedding_size=48, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=72, max_position_embeddings=96,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.ConvBertModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"ConvBertModel is not supported: beside a longer text .* looks at padding"):
        load(tmp_path, dtype)


def test_a_model_that_takes_no_mask_is_refused(tmp_path: Path) -> None:
    """FNet: its Fourier transform runs over all tokens."""
    config = transformers.FNetConfig(
        vocab_size=131, hidden_size=48, num_hidden_layers=2, intermediate_size=72, num_attention_heads=4
    )
    transformers.FNetModel(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="FNetModel is not supported"):
        load(tmp_path)


def test_hidden_states_of_another_width_are_refused(tmp_path: Path) -> None:
    """Vectors would be cut to what config.json says."""
    config = replace(EmbeddingConfig.from_dir(save_tiny_encoder(tmp_path, "bert")).model, hidden_size=32)
    with pytest.raises(ModelError, match=r"state is of 48 numbers, and config\.json's hidden_size is 32"):
        encoder_loader.load_encoder(tmp_path, config, LoadOptions(dtype=torch.float32, device=torch.device("cpu")))


@pytest.mark.parametrize("variant", ENCODERS)
def test_half_precision_passes_and_stays(variant: str, tmp_path: Path) -> None:
    """It is looked at in float32, and has its own weights afterwards."""
    encoder = load(save_tiny_encoder(tmp_path, variant), torch.bfloat16)
    assert {parameter.dtype for parameter in encoder.model.parameters()} == {torch.bfloat16}


def test_random_weights_leave_the_random_state_alone(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    (path / "model.safetensors").unlink()
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    load(path, load_format="dummy")
    assert torch.equal(torch.get_rng_state(), expected)


def test_weights_that_are_not_numbers_are_not_called_an_unknown_architecture(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path, "bert")
    edit_weights(path, encoder__layer__1__output__dense__bias=torch.full((48,), float("nan")))
    with pytest.raises(ModelError, match=r"what it makes of a short text is not finite: its weights are damaged"):
        load(path)
