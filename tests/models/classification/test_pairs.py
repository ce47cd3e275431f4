"""Scores of pairs of texts are transformers' own for each pair alone, token types included, in any crowd."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.models.classification.classification_model import ClassificationModel
from bulkrun.models.classification.classification_model_loader import load_classification_model
from bulkrun.models.config.classification_config import ClassificationConfig
from bulkrun.models.embedding import packed_layers
from bulkrun.models.embedding.padded_encoder import PaddedEncoder
from bulkrun.models.loading.load_options import LoadOptions
from bulkrun.ops.cpu.encoder_stack import can_stack_encoder
from bulkrun.settings import ClassificationArgs, EngineArgs
from bulkrun.text.pairs import EncodedPair
from bulkrun.text.tokenizer import Tokenizer
from tests.models.tiny_encoders import OWN_DECODERS, class_logits
from tests.models.tiny_pairs import KINDS, PAIRS, pair_ids, pair_logits, save_pair_classifier, without_types

LONG = {"max_position_embeddings": 200}
TYPED = {"bert", "bert_in_panels", "electra_in_panels", "deberta_v2_with_types"}


def encoded(path: Path) -> tuple[list[list[int]], int | None]:
    """The ids of all pairs as they go to an engine, the shortest first, and what it is told of token types."""
    tokenizer = Tokenizer.from_dir(path, of_pairs=True)
    made = [pair for pair in tokenizer.encode_pairs(PAIRS) if isinstance(pair, EncodedPair)]
    assert len(made) == len(PAIRS)
    return [pair.token_ids for pair in made], tokenizer.pair_separator


def load(path: Path, separator: int | None, dtype: torch.dtype = torch.float32, **engine: Any) -> ClassificationModel:
    config = ClassificationConfig.from_dir(path)
    args = ClassificationArgs(activation="none", pair_separator=separator)
    options = LoadOptions.of(EngineArgs(**engine), dtype, torch.device("cpu"))
    return load_classification_model(path, config, args, options)


def scores(classifier: ClassificationModel, texts: list[list[int]]) -> torch.Tensor:
    """Of texts in any order."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    made = classifier([texts[index] for index in order])
    return made[torch.tensor(order).argsort()]


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_transformers_for_each_pair_alone(kind: str, tmp_path: Path) -> None:
    path = save_pair_classifier(tmp_path, kind, **LONG)
    texts, separator = encoded(path)
    assert texts == pair_ids(path, PAIRS)
    classifier, expected = load(path, separator), pair_logits(path, PAIRS)
    assert expected.std(0).max() > 0.1, "pairs that all get the same would hide a wrong one"
    torch.testing.assert_close(scores(classifier, texts), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(torch.cat([classifier([text]) for text in texts]), expected, rtol=0, atol=2e-5)
    is_compiled = kind.endswith("in_panels") and can_stack_encoder(torch.float32, 64, 128, 16)
    assert isinstance(classifier.encoder, PaddedEncoder) != (is_compiled or kind in OWN_DECODERS)
    assert (classifier.encoder.pair_separator is not None) == (kind in TYPED)
    if kind in TYPED:
        untyped = class_logits(path, texts)
        assert (untyped - expected).abs().max() > 0.1, "types that do nothing would hide that they are missing"


@pytest.mark.parametrize("kind", ["bert_in_panels", "xlm_roberta_in_panels", "modernbert_in_panels"])
def test_deterministic_scores_have_the_same_bits_in_any_crowd(kind: str, tmp_path: Path) -> None:
    if not can_stack_encoder(torch.float32, 64, 128, 16):
        pytest.skip("encoders are not compiled here")
    path = save_pair_classifier(tmp_path, kind, **LONG)
    texts, separator = encoded(path)
    classifier = load(path, separator, deterministic=True)
    alone = torch.cat([classifier([text]) for text in texts])
    assert torch.equal(scores(classifier, texts), alone)
    assert torch.equal(scores(classifier, texts[::-1][:4]), alone.flip(0)[:4])


@pytest.mark.parametrize("settings", [{"dtype": torch.bfloat16}, {"quantization": "int8"}], ids=str)
@pytest.mark.parametrize("kind", ["bert", "bert_in_panels"])
def test_fewer_bits_keep_each_pair_its_own_scores(kind: str, settings: dict[str, Any], tmp_path: Path) -> None:
    """Logits are nearer to the pair's own in float32 than to any other pair's, and than to those without types."""
    path = save_pair_classifier(tmp_path, kind, **LONG)
    texts, separator = encoded(path)
    exact, untyped = pair_logits(path, PAIRS), class_logits(path, texts)
    near = scores(load(path, separator, **settings), texts)
    assert torch.cdist(near, exact).argmin(-1).tolist() == list(range(len(PAIRS)))
    assert (near - exact).abs().mean() < 0.2 * (untyped - exact).abs().mean()


def test_an_encoder_that_loses_types_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_pair_classifier(tmp_path, "bert_in_panels", **LONG)
    texts, separator = encoded(path)
    monkeypatch.setattr(packed_layers, "typed", lambda *_: {})
    classifier = load(path, separator)
    assert isinstance(classifier.encoder, PaddedEncoder)
    torch.testing.assert_close(scores(classifier, texts), pair_logits(path, PAIRS), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "bert_in_panels"])
def test_single_texts_have_one_type_whatever_they_hold(kind: str, tmp_path: Path) -> None:
    path = save_pair_classifier(tmp_path, kind, **LONG)
    texts, _ = encoded(path)
    torch.testing.assert_close(scores(load(path, None), texts), class_logits(path, texts), rtol=0, atol=2e-5)


@pytest.mark.parametrize("kind", ["bert", "bert_in_panels"])
def test_a_model_of_one_type_and_a_tokenizer_that_says_so_have_none(kind: str, tmp_path: Path) -> None:
    one = save_pair_classifier(tmp_path / "one", kind, type_vocab_size=1, **LONG)
    texts, separator = encoded(one)
    assert separator is None
    torch.testing.assert_close(scores(load(one, 3), texts), class_logits(one, texts), rtol=0, atol=2e-5)
    two = save_pair_classifier(tmp_path / "two", kind, **LONG)
    without_types(two)
    texts, separator = encoded(two)
    assert separator is None
    torch.testing.assert_close(scores(load(two, separator), texts), pair_logits(two, PAIRS), rtol=0, atol=2e-5)


def test_where_config_json_is_silent_the_model_has_the_types_of_its_class(tmp_path: Path) -> None:
    path = save_pair_classifier(tmp_path, "bert_in_panels", **LONG)
    config = json.loads((path / "config.json").read_text())
    assert config.pop("type_vocab_size") == 2
    (path / "config.json").write_text(json.dumps(config))
    texts, separator = encoded(path)
    torch.testing.assert_close(scores(load(path, separator), texts), pair_logits(path, PAIRS), rtol=0, atol=2e-5)
