"""A model directory's tokenizer: text to token ids and back, in batches, on every core.

Reads `tokenizer.json` with the `tokenizers` library alone, so that planning never loads torch or transformers; only a
directory without that file is given to transformers to convert. Ids and text equal transformers' AutoTokenizer where
it takes the file as it is (`TokenizersBackend`); what goes around a text (BOS) is the file's to say, as it is there.
For classes by name (`LlamaTokenizer`) transformers 5 puts a pipeline of its own in the place of the file's, which gives
other ids, as after a special token. Here the file counts: it is what the model's makers saved.
Knows the model's special tokens and chat template; knows no jobs and no rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from bulkrun.errors import ModelError
from bulkrun.request import RowError
from bulkrun.text.byte_tokens import REPLACEMENT, ByteTokens
from bulkrun.text.chat_template import ChatTemplate
from bulkrun.text.pairs import EncodedPair, PairEncoder
from bulkrun.text.special_tokens import add_special_tokens, with_legacy_map

_TEKKEN = "tekken.json"  # the tokenizer of Mistral's own format
_TEKKEN_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
_MAX_TOKEN_ID = 2**24 - 1  # ids that a damaged file makes larger would take the memory of all tables by id


class Tokenizer:
    """Token ids of texts, texts of token ids. Safe to use from several threads; the Rust side releases the GIL.

    `special_tokens` maps names (`bos_token`) to their text; `chat_template` is the Jinja source or None;
    `unusable_template` says why, where the model has one and it cannot be told or read.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        *,
        unusable_template: str | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._backend = backend
        self._backend.no_padding()
        self._backend.no_truncation()
        self._now = now
        self.special_tokens = dict(special_tokens)
        self.chat_template, self._unusable_template = chat_template, unusable_template
        special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self.special_ids, self.special_texts = frozenset(special), frozenset(special.values())
        self._byte_tokens = ByteTokens.of(backend)
        self._pairs: PairEncoder | None = None

    @classmethod
    def from_dir(cls, path: Path, *, now: Callable[[], datetime] = datetime.now, of_pairs: bool = False) -> Tokenizer:
        """The tokenizer of a model directory; `now` is the clock of chat templates that write the date.

        `of_pairs`: for `encode_pairs`, and no other texts: special tokens in them are plain text. Raises ModelError
        where there is none or it cannot be read, and for a form of pairs that is not supported.
        """
        has_file = (path / "tokenizer.json").is_file()
        tokenizer = cls._from_file(path, now) if has_file else _converted_by_transformers(path, now)
        if of_pairs:
            try:
                tokenizer._pairs = PairEncoder(tokenizer._backend, _num_token_types(path))
            except ModelError as problem:
                raise ModelError(f"{path}: {problem}") from None
        return tokenizer

    @classmethod
    def _from_file(cls, path: Path, now: Callable[[], datetime]) -> Tokenizer:
        config = _read_json(path / "tokenizer_config.json")
        legacy_map, legacy_ids = (_read_json(path / name) for name in ("special_tokens_map.json", "added_tokens.json"))
        backend = _load_backend(path / "tokenizer.json")
        backend.encode_special_tokens = bool(config.get("split_special_tokens"))  # as text, where one is written out
        try:
            tokens = add_special_tokens(backend, with_legacy_map(config, legacy_map), legacy_ids)
            template, unusable = _chat_template_source(path, config)
        except ModelError:
            raise
        except Exception as problem:  # of any type: what stands in the place of a token may be anything
            what = f"{type(problem).__name__}: {problem}"
            raise ModelError(f"{path / 'tokenizer_config.json'}: tokens that cannot be used: {what}") from problem
        return cls(backend, tokens, template, unusable_template=unusable, now=now)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id, added tokens included."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def definition(self) -> str:
        """How it makes ids of texts, as JSON: equal for those that make the same."""
        return str(self._backend.to_str())

    @property
    def unused_ids(self) -> list[int]:
        """The ids below that count that belong to no token: a pruned vocabulary has some."""
        used = set(self._backend.get_vocab(with_added_tokens=True).values())
        return [token_id for token_id in range(self.vocab_size) if token_id not in used]

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text by the tokenizer's own word; None where it names none."""
        eos_token = self.special_tokens.get("eos_token")
        return None if eos_token is None else self._backend.token_to_id(eos_token)

    def special_id(self, text: str) -> int | None:
        """The id of the special token with this text, None where it is none."""
        return self._backend.token_to_id(text) if text in self.special_texts else None

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has one; `chat_renderer` raises ModelError where it cannot be used."""
        return self.chat_template is not None or self._unusable_template is not None

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The ids of each text; with `add_special_tokens` also what the model wants around a text (BOS...)."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [encoding.ids for encoding in encodings]

    @property
    def pair_separator(self) -> int | None:
        """Of a tokenizer of pairs: behind the first token of this id all are of the second type; None: of the first."""
        return None if self._pairs is None else self._pairs.separator

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EncodedPair | RowError]:
        """The ids of each pair of texts, with the special tokens around and between them, or why there are none."""
        assert self._pairs is not None, "made for single texts, in which special tokens may be written"
        return self._pairs.encode_batch(pairs)

    def decode_batch(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        """The text of each sequence of ids; only bytes that are not valid UTF-8 become U+FFFD."""
        ids = [list(sequence) for sequence in sequences]
        texts = list(self._backend.decode_batch(ids, skip_special_tokens=skip_special_tokens))
        if self._byte_tokens is None:
            return texts
        skipped = self.special_ids if skip_special_tokens else frozenset()
        broken = (number for number, text in enumerate(texts) if REPLACEMENT in text)
        for number in broken:
            mended = self._byte_tokens.mended([token_id for token_id in ids[number] if token_id not in skipped])
            texts[number] = self._backend.decode(mended, skip_special_tokens=False)
        return texts

    def to_json(self) -> str:
        """The tokenizer as the text of a `tokenizer.json`, for other libraries."""
        return str(self._backend.to_str())

    def chat_renderer(self, source: str | None = None, name: str = "the model's chat template") -> ChatTemplate:
        """The compiled chat template: the model's own, or another `source`. Raises ModelError where it is unusable."""
        if source is None and self._unusable_template is not None:
            raise ModelError(f"{self._unusable_template}; set prompt.chat_template to the file of one, or to none")
        text = self.chat_template if source is None else source
        assert text is not None, "the model has no chat template"
        return ChatTemplate(text, self.special_tokens, name=name, now=self._now)


def _num_token_types(path: Path) -> int | None:
    """How many types of tokens the model has; None where its files are silent."""
    inputs = _read_json(path / "tokenizer_config.json").get("model_input_names")
    if isinstance(inputs, list) and "token_type_ids" not in inputs:
        return 1
    num_types = _read_json(path / "config.json").get("type_vocab_size")
    return num_types if isinstance(num_types, int) else None


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as problem:  # the Rust side raises bare Exception for every defect of the file
        raise ModelError(f"{path}: not a tokenizer file: {problem}") from problem
    last = max(backend.get_vocab(with_added_tokens=True).values(), default=0)
    if last > _MAX_TOKEN_ID:
        raise ModelError(f"{path}: a token has the id {last}, and no vocabulary ends behind {_MAX_TOKEN_ID}")
    return backend


def _converted_by_transformers(path: Path, now: Callable[[], datetime]) -> Tokenizer:
    _refuse_without_sentencepiece(path / "tokenizer.model")
    from transformers import AutoTokenizer  # slow to import, and needed by few models

    try:
        slow = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, ImportError, KeyError) as problem:
        if "AutoTokenizer" in (_read_json(path / "tokenizer_config.json").get("auto_map") or {}):
            raise ModelError(
                f"{path}: no tokenizer.json, and the tokenizer is code that comes with the model (auto_map in "
                "tokenizer_config.json), which is never run; take a checkpoint of the model that has a tokenizer.json"
            ) from None
        raise ModelError(f"{path}: no tokenizer.json, and transformers cannot make one: {problem}") from problem
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(f"{path}: {type(slow).__name__} has no fast tokenizer; save one as tokenizer.json")
    tokens = dict(slow.special_tokens_map)
    _refuse_without_words(path, backend, tokens)
    template, unusable = _chat_template_source(path, _read_json(path / "tokenizer_config.json"))
    begin = backend.token_to_id(_TEKKEN_TOKENS["bos_token"])
    if (path / _TEKKEN).is_file() and begin is not None:  # which gives what begins and ends a text no names
        _refuse_shared_ids(backend, path / _TEKKEN)
        tokens = _TEKKEN_TOKENS | tokens
        backend.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    return Tokenizer(backend, tokens, template, unusable_template=unusable, now=now)


def _refuse_without_words(path: Path, backend: tokenizers.Tokenizer, tokens: Mapping[str, Any]) -> None:
    """Raise ModelError where there is no file of words: for a BERT transformers makes a tokenizer that knows none."""
    if set(backend.get_vocab(with_added_tokens=True)) <= {str(token) for token in tokens.values()}:
        raise ModelError(f"{path}: no tokenizer.json, and no vocab.txt or other file to make one of; copy it there")


def _refuse_shared_ids(backend: tokenizers.Tokenizer, file: Path) -> None:
    """Raise ModelError where words have the ids of special tokens: transformers before 5.15 numbers both from 0."""
    ids = backend.get_vocab(with_added_tokens=True).values()
    if len(set(ids)) < len(ids):
        raise ModelError(
            f"{file}: the transformers that is installed gives its words wrong ids; run `pip install -U "
            "'transformers>=5.15'`, or save the tokenizer as tokenizer.json with a newer one: "
            "AutoTokenizer.from_pretrained(path).save_pretrained(path)"
        )


def _refuse_without_sentencepiece(file: Path) -> None:
    """Raise ModelError for a SentencePiece file that cannot be read here: transformers takes it for one of tiktoken."""
    if file.is_file() and file.read_bytes()[:1] == b"\n" and find_spec("sentencepiece") is None:
        raise ModelError(
            f"{file}: reading it needs a package that is not there, as tokenizer.json is missing; run `pip install "
            "sentencepiece protobuf`, or save the tokenizer as tokenizer.json where they are: "
            "AutoTokenizer.from_pretrained(path).save_pretrained(path)"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as problem:
        raise ModelError(f"{path}: not valid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: holds a {type(value).__name__}, not an object")
    return value


def _template_files(path: Path) -> dict[str, str]:
    """The chat templates in files of their own, by name."""
    more = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    files = {"default": path / "chat_template.jinja", **more}
    return {name: _read_template(file) for name, file in files.items() if file.is_file()}


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ModelError(f"{file}: not UTF-8 text: {problem}") from None


def _chat_template_source(path: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template's source: of its own files, else of the config, the only one or that named default; or why not.

    Models that also see may bring it with what prepares their images alone: that is asked last.
    """
    source = _template_files(path) or config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}
    if isinstance(source, Mapping) and source:
        named = f"{path}: of the chat templates {', '.join(map(str, source))} none is named default"
        return source.get("default"), None if "default" in source else named
    if source is None:
        source = _read_json(path / "chat_template.json").get("chat_template")
    if isinstance(source, str):
        return source, None
    is_elsewhere = (path / _TEKKEN).is_file() and not (path / "tokenizer.json").is_file()
    return None, f"{path}: no chat template; that of {_TEKKEN} is in mistral-common alone" if is_elsewhere else None
