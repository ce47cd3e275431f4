"""Adapters beside which tokenizers lie: another one than the model's is found, whichever lay there before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bulkrun.errors import ModelError
from bulkrun.launch.preparation.adapter_texts import check_tokenizers
from bulkrun.text.tokenizer import Tokenizer

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def older(folder: Path, *words: str) -> Path:
    """A tokenizer of words whose vocabulary is no JSON, as trainers save it that do not convert it."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in [*SPECIAL, *words]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return folder


def test_vocabularies_count_that_are_no_json(tmp_path: Path) -> None:
    model = Tokenizer.from_dir(older(tmp_path / "model", "read", "close"))
    same, other = older(tmp_path / "same", "read", "close"), older(tmp_path / "other", "close", "read")
    check_tokenizers(model, {"same": same, "again": same}, has_template=True)
    with pytest.raises(ModelError, match=r"engine\.adapters\.other: .* has another tokenizer than the model"):
        check_tokenizers(model, {"same": same, "other": other}, has_template=True)
