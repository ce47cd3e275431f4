"""Tokens of which tokenizer.json and the other files say different things. The oracle is AutoTokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from bulkrun.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import byte_level

TURN, NEW = "<|im_end|>", "<|new|>"
TEXTS = [f"<s>a</s> <|im_start|>b\n{TURN} \n The", f"The {NEW} <|x|> end"]
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}


def listed(text: str = TURN, **flags: Any) -> dict[str, Any]:
    return {"added_tokens_decoder": {"3": {"content": text, **PLAIN, **flags}}}


# name -> (the flags of TURN in tokenizer.json, tokenizer_config.json, other files)
SAID: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "an end that is not special in the file": ({"special": False}, {"eos_token": TURN}, {}),
    "special in the config's list alone": ({"special": False}, listed(), {}),
    "not special in the config's list alone": ({}, listed(special=False), {}),
    "takes the space behind it, by the config's list": ({}, listed(rstrip=True), {}),
    "takes the space behind it, by the file alone": ({"rstrip": True}, listed() | {"eos_token": TURN}, {}),
    "the list does not know the end": ({"rstrip": True, "special": False}, listed("<s>") | {"eos_token": TURN}, {}),
    "the list has its order by numbers": (
        {},
        {"added_tokens_decoder": {"1000": {"content": "<|x|>", **PLAIN}, "999": {"content": NEW, **PLAIN}}},
        {},
    ),
    "one of the extra ones": ({"rstrip": True, "special": False}, {"additional_special_tokens": [TURN]}, {}),
    "an end that is a word": ({}, {"eos_token": "The"}, {}),
    "names of the model's own": ({"special": False}, {"image_token": NEW, "turn_token": TURN}, {}),
    "extra ones with and without names": (
        {},
        {"extra_special_tokens": {"image_token": NEW}, "additional_special_tokens": ["<|x|>"]},
        {},
    ),
    "several that the file lacks": ({}, {"pad_token": NEW, "unk_token": "<|x|>"}, {}),
    "the old map wins over the config": (
        {},
        {"eos_token": "</s>"},
        {"special_tokens_map": {"eos_token": {"content": TURN, **PLAIN}, "additional_special_tokens": [NEW]}},
    ),
    "the list ends the time of the old map": (
        {},
        listed() | {"eos_token": None},
        {"special_tokens_map": {"eos_token": TURN, "additional_special_tokens": [NEW]}},
    ),
    "the old list": ({}, {}, {"added_tokens": {TURN: 3, "<|x|>": 421, NEW: 420}}),
}


@pytest.mark.parametrize("name", SAID)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    flags, config, others = SAID[name]
    file = byte_level(tmp_path, config) / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["added_tokens"][3] |= flags
    file.write_text(json.dumps(saved))
    for other, content in others.items():
        (tmp_path / f"{other}.json").write_text(json.dumps(content))
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)
    ids = ours.encode_batch(TEXTS, True)
    assert ids == [theirs.encode(text) for text in TEXTS]
    for skip in (True, False):
        assert ours.decode_batch(ids, skip) == [theirs.decode(row, skip_special_tokens=skip) for row in ids]
    shown = [token_id for token_id in range(len(theirs)) if theirs.decode([token_id], skip_special_tokens=True)]
    assert ours.special_ids == {*range(len(theirs))}.difference(shown)
