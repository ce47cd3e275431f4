"""Small classifiers with tokenizers of their kinds, for pairs of texts; and transformers' scores of each pair alone.

Tokenizers know letters and a few words. Each joins two texts in its family's way.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    DistilBertTokenizer,
    PreTrainedTokenizerFast,
)

from tests.models.tiny_encoders import save_tiny_classifier, write_json

Pair = tuple[str, str]

PAIRS: list[Pair] = [
    ("a", "b"),
    ("close the file", "read a line of it and all"),
    ("read a [SEP] of it </s> and <s> all", "close [CLS] the [SEP] files"),
    ("b", "the file " * 20),
    ("read all files and " * 6, "it"),
    ("the line", "the line"),
    ("read a line", "close the file"),
]
_LETTERS = "abcdefghijklmnopqrstuvwxyz[]</>"
_WORDS = ["close", "the", "file", "read", "line", "of", "it", "and", "all"]
_BERT_VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_LETTERS, *(f"##{x}" for x in _LETTERS[:26]), *_WORDS]
_ROBERTA_LIKE = "<s> $A </s> </s> $B </s>"

# name -> (variant of `save_tiny_classifier`, kind of tokenizer)
KINDS: dict[str, tuple[str, str]] = {
    "bert": ("bert", "bert"),
    "bert_in_panels": ("bert_in_panels", "bert"),
    "electra_in_panels": ("electra_in_panels", "bert"),
    "roberta": ("roberta", "bytes"),
    "xlm_roberta_in_panels": ("xlm_roberta_in_panels", "unigram"),
    "distilbert_in_panels": ("distilbert_in_panels", "distilbert"),
    "mpnet_in_panels": ("mpnet_in_panels", "bytes"),
    "modernbert_in_panels": ("modernbert_in_panels", "bytes_in_brackets"),
    "deberta_v2": ("deberta_v2", "unigram_in_brackets"),
    "deberta_v2_with_types": ("deberta_v2_with_types", "bert"),
    "qwen2": ("qwen2", "plain_bytes"),
    "llama": ("llama", "bytes_behind_bos"),
}


def save_pair_classifier(path: Path, kind: str, **overrides: Any) -> Path:
    """A classifier of three labels, a, b and c, and its tokenizer."""
    variant, tokenizer = KINDS[kind]
    save_tiny_classifier(path, variant, **overrides)
    if tokenizer in ("bert", "distilbert"):
        made = {"bert": BertTokenizer, "distilbert": DistilBertTokenizer}[tokenizer]
        made(vocab={word: number for number, word in enumerate(_BERT_VOCAB)}).save_pretrained(path)
        return path
    _save_generic(path, tokenizer)
    return path


def _save_generic(path: Path, kind: str) -> None:
    special = ["[CLS]", "[PAD]", "[SEP]", "<unk>"] if "brackets" in kind else ["<s>", "<pad>", "</s>", "<unk>"]
    backend = _unigram(special) if kind.startswith("unigram") else _bytes(special)
    cls, _, sep, _ = special
    forms = {
        "plain_bytes": None,
        "bytes_behind_bos": (f"{cls} $A", f"{cls} $A {cls}:1 $B:1"),
        "bytes_in_brackets": (f"{cls} $A {sep}", f"{cls} $A {sep} $B {sep}"),
        "unigram_in_brackets": (f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1"),
    }
    form = forms.get(kind, ("<s> $A </s>", _ROBERTA_LIKE))
    if form is not None:
        single, pair = form
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=pair, special_tokens=[(cls, 0), (sep, 2)]
        )
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=backend, **names).save_pretrained(path)


def _bytes(special: Sequence[str]) -> Tokenizer:
    letters = [*special, "Ġ", *_LETTERS, *"SEPCL", "th", "the", "Ġthe", "ea"]
    backend = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(letters)},
            merges=[("t", "h"), ("th", "e"), ("Ġ", "the"), ("e", "a")],
            unk_token="<unk>",
        )
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(special))
    return backend


def _unigram(special: Sequence[str]) -> Tokenizer:
    """As SentencePiece makes them, it has its special tokens among its pieces."""
    pieces = [(token, 0.0) for token in special] + [("▁", -2.0)]
    pieces += [(letter, -4.0) for letter in _LETTERS] + [(f"▁{word}", -5.0) for word in _WORDS]
    backend = Tokenizer(models.Unigram(pieces, unk_id=3))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(list(special))
    return backend


def without_types(path: Path) -> None:
    """Have a tokenizer say that its model takes none."""
    file = path / "tokenizer_config.json"
    write_json(file, json.loads(file.read_text()) | {"model_input_names": ["input_ids", "attention_mask"]})


@torch.no_grad()
def pair_logits(path: Path, pairs: Sequence[Pair], *, side: str = "right", **tokenizing: Any) -> torch.Tensor:
    """transformers' logits float32 [S, C] of each pair alone; special tokens in the texts are plain text.

    `side`: where they are cut if `tokenizing` says so.
    """
    tokenizer = AutoTokenizer.from_pretrained(path, split_special_tokens=True, truncation_side=side)
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32).eval()
    encoded = [tokenizer(*pair, return_tensors="pt", **tokenizing) for pair in pairs]
    return torch.cat([model(**one).logits for one in encoded])


def pair_ids(path: Path, pairs: Sequence[Pair], **tokenizing: Any) -> list[list[int]]:
    """transformers' token ids of each pair."""
    tokenizer = AutoTokenizer.from_pretrained(path, split_special_tokens=True)
    return [tokenizer(*pair, **tokenizing)["input_ids"] for pair in pairs]
