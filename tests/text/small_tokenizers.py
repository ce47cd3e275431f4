"""Small tokenizers as model directories, trained in the test: byte-level BPE and the SentencePiece-like kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS = [
    "The quick brown fox jumps over the lazy dog. The end.",
    "def encode(self, text: str) -> list[int]:\n    return self.tokenizer.encode(text)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — naïve café",
    "日本語のテキスト、絵文字 🎉🚀 и немного кириллицы",
    "numbers 0123456789 and   spaces\t\ttabs\r\n",
] * 3

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]


def byte_level(folder: Path, config: dict[str, Any] | None = None, *, vocab_size: int = 420) -> Path:
    """A byte-level BPE tokenizer (GPT-2, Qwen, Llama 3 style) in `folder`."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=SPECIAL)
    backend.train_from_iterator(TEXTS, trainer)
    return save(folder, backend, {"bos_token": "<s>", "eos_token": "</s>", **(config or {})})


def with_gaps(folder: Path) -> Path:
    """The byte-level one with every second id left out, as after pruning; the last is </s>."""
    file = byte_level(folder) / "tokenizer.json"
    saved = json.loads(file.read_text())
    ids = {content: 2 * number for content, number in saved["model"]["vocab"].items()}
    ids["</s>"] = 2 * len(ids)
    saved["model"]["vocab"] = ids
    for token in saved["added_tokens"]:
        token["id"] = ids[token["content"]]
    file.write_text(json.dumps(saved))
    return folder


def metaspace(folder: Path, config: dict[str, Any] | None = None) -> Path:
    """A BPE with metaspace, byte fallback and a BOS post-processor (Llama 2, Mistral style) in `folder`."""
    characters = sorted({character for text in TEXTS for character in text.replace(" ", "▁") if ord(character) < 0x250})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters]
    words = ["th", "the", "▁the", "en", "▁q", "er", "in", "on", "▁f"]
    vocab = {token: number for number, token in enumerate(dict.fromkeys([*tokens, *words]))}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("▁", "the"),
        ("e", "n"),
        ("▁", "q"),
        ("e", "r"),
        ("i", "n"),
        ("o", "n"),
        ("▁", "f"),
    ]
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(content=" ", left=1)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", vocab["<s>"])]
    )
    return save(folder, backend, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **(config or {})})


def save(folder: Path, backend: tokenizers.Tokenizer, config: dict[str, Any]) -> Path:
    """Write the files of a model directory."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
