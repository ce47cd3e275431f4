"""Pairs of texts as transformers encodes them; where the second begins; and what the ids tell of token types."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import processors
from transformers import AutoTokenizer

from bulkrun.errors import ModelError
from bulkrun.models.embedding.packed_texts import PackedTexts
from bulkrun.request import RowError
from bulkrun.text.pairs import EncodedPair, PairEncoder
from bulkrun.text.tokenizer import Tokenizer
from tests.models.tiny_pairs import KINDS, PAIRS, pair_ids, save_pair_classifier
from tests.text.small_tokenizers import byte_level

LITERAL = ("a [SEP] b", "[SEP] [CLS]")


def separated(backend: Backend, **form: str) -> None:
    tokens = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(special_tokens=tokens, **form)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save_pair_classifier(tmp_path, "bert")


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_transformers_own_and_the_second_text_is_where_it_says(kind: str, tmp_path: Path) -> None:
    path = save_pair_classifier(tmp_path, kind)
    made = Tokenizer.from_dir(path, of_pairs=True).encode_pairs(PAIRS)
    assert [pair.token_ids for pair in made if isinstance(pair, EncodedPair)] == pair_ids(path, PAIRS)
    alone = AutoTokenizer.from_pretrained(path, split_special_tokens=True)
    for (_, second), pair in zip(PAIRS, made, strict=True):
        assert isinstance(pair, EncodedPair)
        assert pair.token_ids[pair.start : pair.end] == alone(second, add_special_tokens=False)["input_ids"]


def test_special_tokens_in_a_pair_are_plain_text(bert: Path) -> None:
    [pair] = Tokenizer.from_dir(bert, of_pairs=True).encode_pairs([LITERAL])
    assert isinstance(pair, EncodedPair) and pair.token_ids.count(3) == 2 and pair.token_ids.count(2) == 1
    [single] = Tokenizer.from_dir(bert).encode_batch([LITERAL[0]], add_special_tokens=True)
    assert single.count(3) == 2, "in a single text they are what they were"


def test_a_tokenizer_without_a_form_for_pairs_puts_one_text_behind_the_other(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    theirs = AutoTokenizer.from_pretrained(path)
    tokenizer = Tokenizer.from_dir(path, of_pairs=True)
    [pair] = tokenizer.encode_pairs([("the end", "a dog")])
    assert isinstance(pair, EncodedPair) and pair.token_ids == theirs("the end", "a dog")["input_ids"]
    assert tokenizer.pair_separator is None and pair.end == len(pair.token_ids)


@given(st.lists(st.tuples(st.text("ab []SEP", min_size=1), st.text("ab []SEP", min_size=1)), min_size=1, max_size=5))
def test_types_are_told_by_ids_alone(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]) -> None:
    path = tmp_path_factory.getbasetemp() / "bert_of_pairs"
    if not path.exists():
        save_pair_classifier(path, "bert")
    tokenizer, theirs = Tokenizer.from_dir(path, of_pairs=True), AutoTokenizer.from_pretrained(path)
    for pair, made in zip(pairs, tokenizer.encode_pairs(pairs), strict=True):
        expected = theirs(*pair, split_special_tokens=True)
        if isinstance(made, RowError):
            assert made.code == "empty_prompt" and not theirs(pair[1], add_special_tokens=False)["input_ids"]
            continue
        assert tokenizer.pair_separator == 3 and made.token_ids == expected["input_ids"]
        packed = PackedTexts.of([[7], made.token_ids], torch.device("cpu"))
        assert packed.types(3).tolist() == [0, *expected["token_type_ids"]]


def test_a_second_text_of_no_tokens_has_none(bert: Path) -> None:
    [error] = Tokenizer.from_dir(bert, of_pairs=True).encode_pairs([("a", "\u200b\x07")])
    assert isinstance(error, RowError) and error.code == "empty_prompt" and "text_pair" in error.message


def test_a_separator_that_comes_out_of_a_text_is_an_error_where_types_depend_on_it(tmp_path: Path) -> None:
    """SentencePiece has its special tokens among its pieces."""
    path = save_pair_classifier(tmp_path, "deberta_v2")
    pairs = [("a [SEP] b", "a"), ("a", "b [SEP]")]
    assert not any(isinstance(pair, RowError) for pair in Tokenizer.from_dir(path, of_pairs=True).encode_pairs(pairs))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"type_vocab_size": 2}))
    tokenizer = Tokenizer.from_dir(path, of_pairs=True)
    error, pair = tokenizer.encode_pairs(pairs)
    assert tokenizer.pair_separator == 2 and isinstance(pair, EncodedPair)
    assert isinstance(error, RowError) and error.code == "bad_input" and "holds '[SEP]'" in error.message


@pytest.mark.parametrize(
    "pair",
    ["[CLS] $A $B:1 [SEP]:1", "[CLS] $A:1 [SEP] $B:1", "[SEP] $A [SEP] $B:1", "[CLS] $A [SEP] $B:1 [SEP]:2"],
)
def test_types_of_another_form_are_refused_where_the_model_has_types(pair: str, bert: Path) -> None:
    backend = Backend.from_file(str(bert / "tokenizer.json"))
    separated(backend, single="[CLS] $A [SEP]", pair=pair)
    with pytest.raises(ModelError, match="a pair of texts has token types"):
        PairEncoder(backend, 2)
    assert PairEncoder(backend, 1).separator is None and PairEncoder(backend).separator is None
    backend.save(str(bert / "tokenizer.json"))
    with pytest.raises(ModelError, match=rf"{bert}: a pair of texts has token types"):
        Tokenizer.from_dir(bert, of_pairs=True)


def test_a_tokenizer_that_gives_both_texts_one_type_needs_no_separator(bert: Path) -> None:
    backend = Backend.from_file(str(bert / "tokenizer.json"))
    separated(backend, single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]")
    assert PairEncoder(backend, 2).separator is None


@pytest.mark.parametrize(("inputs", "separator"), [(["token_type_ids"], 3), ([], None)])
def test_a_model_that_is_given_no_types_has_none(inputs: list[str], separator: int | None, bert: Path) -> None:
    config = json.loads((bert / "tokenizer_config.json").read_text())
    named = {"model_input_names": ["input_ids", *inputs, "attention_mask"]}
    (bert / "tokenizer_config.json").write_text(json.dumps(config | named))
    assert Tokenizer.from_dir(bert, of_pairs=True).pair_separator == separator
