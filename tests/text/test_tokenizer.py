"""The oracle is transformers' AutoTokenizer on the same directory."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.models import WordLevel
from transformers import AutoTokenizer

from bulkrun.errors import ModelError
from bulkrun.text import tokenizer as tokenizer_module
from bulkrun.text.tokenizer import Tokenizer
from tests.text.small_tokenizers import byte_level, metaspace

NEW_TOKEN = {"content": "<|new|>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
MAKERS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "byte level": (byte_level, {}),
    "byte level, adds bos": (byte_level, {"add_bos_token": True}),
    "byte level, adds bos and eos": (byte_level, {"add_bos_token": True, "add_eos_token": True}),
    "byte level, token in the config only": (byte_level, {"pad_token": "<|pad|>", "extra_special_tokens": ["<|x|>"]}),
    "byte level, added_tokens_decoder": (byte_level, {"added_tokens_decoder": {"420": {**NEW_TOKEN, "special": True}}}),
    "byte level, bos as object": (byte_level, {"bos_token": {"__type": "AddedToken", **NEW_TOKEN, "content": "<s>"}}),
    "metaspace, bos": (metaspace, {}),
    "metaspace, config switches bos off": (metaspace, {"add_bos_token": False}),
    "metaspace, token in the config only": (metaspace, {"pad_token": "<|pad|>"}),
}
TEXTS = [
    "The fox",
    " leading and trailing ",
    "<s>user</s> <|im_start|>system\n<|im_end|>",
    "<|new|> a<|x|>b <|pad|>",
    "naïve 日本語 🎉 e\u0301 \u200b",
    "line\nbreaks\r\n\ttabs",
    "\x00\x01",
    "",
]


@cache
def both(name: str) -> tuple[Tokenizer, Any]:
    make, config = MAKERS[name]
    folder = make(Path(mkdtemp()), config)
    return Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("add_special_tokens", [True, False])
@pytest.mark.parametrize("name", MAKERS)
def test_ids_and_texts_equal_transformers(name: str, add_special_tokens: bool) -> None:
    ours, theirs = both(name)
    ids = ours.encode_batch(TEXTS, add_special_tokens)
    assert ids == [theirs.encode(text, add_special_tokens=add_special_tokens) for text in TEXTS]
    for skip in (True, False):
        assert ours.decode_batch(ids, skip) == [theirs.decode(row, skip_special_tokens=skip) for row in ids]


def test_the_file_counts_and_not_what_transformers_5_makes_of_a_class_of_its_own(tmp_path: Path) -> None:
    folder = metaspace(tmp_path, {"tokenizer_class": "LlamaTokenizer", "legacy": False})
    file = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours, theirs = Tokenizer.from_dir(folder).encode_batch(TEXTS, True), AutoTokenizer.from_pretrained(folder)
    assert ours == [file.encode(text).ids for text in TEXTS]
    assert ours != [theirs.encode(text) for text in TEXTS], "transformers reads the file now: say so in tokenizer.py"


@settings(max_examples=40)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=5))
@pytest.mark.parametrize("name", ["byte level, adds bos and eos", "metaspace, bos"])
def test_any_text_equals_transformers(name: str, texts: list[str]) -> None:
    ours, theirs = both(name)
    ids = ours.encode_batch(texts, True)
    assert ids == [theirs.encode(text) for text in texts]
    assert ours.decode_batch(ids) == [theirs.decode(row, skip_special_tokens=True) for row in ids]


def cut_texts(name: str, text: str) -> list[str]:
    """What the text reads when its output ends after each of its tokens."""
    ours, _ = both(name)
    [ids] = ours.encode_batch([text], False)
    return ours.decode_batch([ids[:count] for count in range(len(ids) + 1)])


@pytest.mark.parametrize("name", ["byte level", "metaspace, bos"])
def test_an_output_that_is_cut_inside_a_character_loses_that_character_alone(name: str) -> None:
    text = "The 日本語の説明 🎉🚀"
    assert cut_texts(name, text)[-1] == text
    for cut in cut_texts(name, text):
        assert text.startswith(cut.removesuffix("\ufffd"))


@settings(max_examples=150)
@given(st.lists(st.sampled_from([*"é本🎉".encode(), 0x41, 0xFF, 0xC0]), max_size=12), st.data())
def test_byte_tokens_read_as_their_bytes_whatever_is_between_them(content: list[int], data: st.DataObject) -> None:
    """Oracle: Python's decoder. Special tokens that are skipped part no bytes; those that are shown do."""
    ours, theirs = both("metaspace, bos")
    end = theirs.convert_tokens_to_ids("</s>")
    at = data.draw(st.integers(0, len(content)))
    ids = [theirs.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in content]
    ids.insert(at, end)
    before, after = bytes(content[:at]), bytes(content[at:])
    assert ours.decode_batch([ids]) == [(before + after).decode(errors="replace")]
    assert ours.decode_batch([ids], False) == ["</s>".join(part.decode(errors="replace") for part in (before, after))]


@pytest.mark.parametrize("name", MAKERS)
def test_special_tokens_and_size_equal_transformers(name: str) -> None:
    ours, theirs = both(name)
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.vocab_size == len(theirs)
    named = ("bos_token", "eos_token")
    assert [ours.special_tokens.get(name) for name in named] == [getattr(theirs, name) for name in named]
    assert [ours.encode_batch([token], False)[0] for token in theirs.all_special_tokens] == [
        [token_id] for token_id in theirs.convert_tokens_to_ids(theirs.all_special_tokens)
    ]


def test_a_word_is_no_special_token(tmp_path: Path) -> None:
    """Of which a grammar would ask by its id, though other tokens write the same text."""
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path))
    assert [tokenizer.special_id(text) for text in ("</s>", "the", "<|none|>")] == [1, None, None]


def test_padding_and_truncation_saved_in_the_file_are_ignored(tmp_path: Path) -> None:
    saved = json.loads((byte_level(tmp_path) / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padding = {"pad_id": 0, "pad_type_id": 0, "pad_token": "<s>", "pad_to_multiple_of": None}
    saved["padding"] = {"strategy": "BatchLongest", "direction": "Left", **padding}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    long, short = Tokenizer.from_dir(tmp_path).encode_batch(["a longer text than three tokens", "x"], True)
    assert len(long) > 3 and len(short) == 1


@pytest.mark.parametrize("form", ["file", "config", "named list"])
def test_chat_template_is_found_in_every_form(tmp_path: Path, form: str) -> None:
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": template}]
    byte_level(tmp_path, {"config": {"chat_template": template}, "named list": {"chat_template": named}}.get(form))
    if form == "file":
        (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_dir(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    theirs = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tokenize=False)
    assert tokenizer.has_chat_template
    assert tokenizer.chat_renderer().render(messages, add_generation_prompt=False) == theirs == "<s>[user]hi"


def test_a_chat_template_that_only_the_processor_brings_is_found(tmp_path: Path) -> None:
    """As vLLM finds it; transformers' tokenizer does not."""
    (byte_level(tmp_path) / "chat_template.json").write_text(
        json.dumps({"chat_template": "{{ messages[0].content }}!"})
    )
    assert Tokenizer.from_dir(tmp_path).chat_template == "{{ messages[0].content }}!"
    byte_level(tmp_path, {"chat_template": "the tokenizer's"})
    assert Tokenizer.from_dir(tmp_path).chat_template == "the tokenizer's"


@pytest.mark.parametrize("form", [list, dict])
def test_of_several_chat_templates_without_a_default_none_is_taken_in_silence(tmp_path: Path, form: type) -> None:
    named = {"rag": "x", "tool_use": "y"}
    source = named if form is dict else [{"name": name, "template": template} for name, template in named.items()]
    tokenizer = Tokenizer.from_dir(byte_level(tmp_path, {"chat_template": source}))
    assert tokenizer.has_chat_template
    assert tokenizer.chat_renderer("{{ messages[0].content }}").render([{"content": "own"}]) == "own"
    with pytest.raises(
        ModelError, match=r"of the chat templates rag, tool_use none is named default; set prompt\.chat"
    ):
        tokenizer.chat_renderer()
    byte_level(tmp_path, {"chat_template": {"default": "d", **named}})
    assert Tokenizer.from_dir(tmp_path).chat_template == "d"


@pytest.mark.parametrize("is_default", [True, False])
def test_chat_templates_in_files_by_name_are_those_of_transformers(tmp_path: Path, is_default: bool) -> None:
    """The default is the model's own file, or one of that name; the config's counts no more."""
    byte_level(tmp_path, {"chat_template": "the config's"})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/rag.jinja").write_text("with documents")
    names = ["chat_template", "additional_chat_templates/default"] if is_default else []
    for name in names:
        (tmp_path / f"{name}.jinja").write_text(f"of {name}")
        assert Tokenizer.from_dir(tmp_path).chat_template == f"of {name}"
        assert AutoTokenizer.from_pretrained(tmp_path).get_chat_template() == f"of {name}"
    if not is_default:
        with pytest.raises(ModelError, match="of the chat templates rag none is named default"):
            Tokenizer.from_dir(tmp_path).chat_renderer()


def test_special_tokens_that_are_to_be_split_are(tmp_path: Path) -> None:
    ours = Tokenizer.from_dir(byte_level(tmp_path, {"split_special_tokens": True}))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    text = f"a{theirs.eos_token}b"
    assert ours.encode_batch([text], True)[0] == theirs(text)["input_ids"]
    assert theirs.eos_token_id not in ours.encode_batch([text], False)[0]


def test_mistrals_own_tokenizer_begins_a_text_and_says_where_its_chat_template_is(tmp_path: Path) -> None:
    """As mistral-common, which transformers does without, leaving the BOS and the end out."""
    special = [
        {"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(["<unk>", "<s>", "</s>"])
    ]
    words = [bytes([byte]) for byte in range(256)]
    vocab = [{"rank": rank, "token_bytes": b64encode(word).decode()} for rank, word in enumerate(words)]
    sizes = {"num_vocab_tokens": 256, "default_vocab_size": 259, "default_num_special_tokens": 3}
    saved = {"config": {"pattern": r"\w+|\W+", "version": "v7", **sizes}, "vocab": vocab, "special_tokens": special}
    (tmp_path / "tekken.json").write_text(json.dumps(saved))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode_batch(["a</s>"], True) == [[1, 3 + ord("a"), 2]]
    assert tokenizer.encode_batch(["a"], False) == [[3 + ord("a")]]
    assert (tokenizer.eos_token_id, tokenizer.special_tokens["bos_token"]) == (2, "<s>")
    assert tokenizer.has_chat_template
    with pytest.raises(
        ModelError, match=r"no chat template; that of tekken\.json is in mistral-common alone; set prompt"
    ):
        tokenizer.chat_renderer()


def test_a_tekken_file_that_transformers_numbers_wrongly_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers before 5.15 does: the words have the ids from 0 on, and the special tokens have them too."""
    backend = tokenizers.Tokenizer(WordLevel({"a": 0, "b": 1, "<s>": 1}))
    made = SimpleNamespace(backend_tokenizer=backend, special_tokens_map={})
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *_, **__: made)
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tekken\.json: the transformers .* wrong ids; .*'transformers>=5\.15'"):
        Tokenizer.from_dir(tmp_path)


def test_a_sentencepiece_file_that_cannot_be_read_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda name: None)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    with pytest.raises(ModelError, match=r"tokenizer\.model: .*pip install sentencepiece protobuf"):
        Tokenizer.from_dir(tmp_path)


def test_a_directory_without_a_tokenizer_is_a_model_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=str(tmp_path)):
        Tokenizer.from_dir(tmp_path)


def test_a_directory_without_tokenizer_json_is_converted(tmp_path: Path) -> None:
    model = json.loads((byte_level(tmp_path / "whole") / "tokenizer.json").read_text())["model"]
    old = tmp_path / "old"
    old.mkdir()
    (old / "vocab.json").write_text(json.dumps(model["vocab"]))
    (old / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (old / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", "eos_token": "</s>"}))
    ours, theirs = Tokenizer.from_dir(old), AutoTokenizer.from_pretrained(old)
    assert ours.encode_batch(TEXTS, True) == [theirs.encode(text) for text in TEXTS]


def test_a_bert_of_an_older_time_is_converted_and_one_without_words_is_refused(tmp_path: Path) -> None:
    """Without a file of words transformers makes a tokenizer to which every text is the same."""
    (tmp_path / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    with pytest.raises(ModelError, match=r"no tokenizer.json, and no vocab.txt"):
        Tokenizer.from_dir(tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "close", "the", "##s", "file"]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    ours, theirs = Tokenizer.from_dir(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    [ids] = ours.encode_batch(["Close the files"], add_special_tokens=True)
    assert ids == theirs.encode("Close the files") == [2, 5, 6, 8, 7, 3]


def test_a_tokenizer_that_is_code_of_the_model_is_refused_as_that(tmp_path: Path) -> None:
    config = {"tokenizer_class": "XTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(
        ModelError, match=r"no tokenizer.json, and the tokenizer is code .* never run; take a checkpoint"
    ):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_file_is_a_model_error_that_names_it(tmp_path: Path, file: str) -> None:
    (byte_level(tmp_path) / file).write_text('{"version": ')
    with pytest.raises(ModelError, match=file):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("[" * 100_000, "not valid JSON"),
        ('{"bos_token": 5}', "bos_token is 5, not a token"),
        ('{"eos_token": {"a": 1}}', "eos_token is {'a': 1}, not a token"),
        ('{"added_tokens_decoder": {"x": {"content": "a"}}}', "'x'"),
        ('{"added_tokens_decoder": {"1": "a"}}', "TypeError"),
        ('{"added_tokens_decoder": [1]}', "AttributeError"),
        ('{"extra_special_tokens": 5}', "TypeError"),
        ('{"additional_special_tokens": [5]}', "5, not a token"),
        ('{"chat_template": [{"x": 1}]}', "KeyError"),
    ],
)
def test_tokens_that_are_none_are_a_model_error_that_names_the_file(tmp_path: Path, config: str, said: str) -> None:
    (byte_level(tmp_path) / "tokenizer_config.json").write_text(config)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: .*{re.escape(said)}"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("token_id", [2**24, 4_000_000_000])
def test_an_id_that_no_vocabulary_has_is_a_model_error_that_names_the_file(tmp_path: Path, token_id: int) -> None:
    file = byte_level(tmp_path) / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["model"]["vocab"]["far"] = token_id
    file.write_text(json.dumps(saved))
    with pytest.raises(ModelError, match=rf"tokenizer\.json: a token has the id {token_id}"):
        Tokenizer.from_dir(tmp_path)


@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.jinja"])
def test_a_file_that_is_not_utf8_is_a_model_error_that_names_it(tmp_path: Path, file: str) -> None:
    (byte_level(tmp_path) / file).write_bytes(b"\xff\xfea\0")
    with pytest.raises(ModelError, match=rf"{file}: not .*0xff"):
        Tokenizer.from_dir(tmp_path)


def test_a_byte_order_mark_before_the_chat_template_is_no_part_of_it(tmp_path: Path) -> None:
    (byte_level(tmp_path) / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf{{ messages[0].content }}")
    assert Tokenizer.from_dir(tmp_path).chat_template == "{{ messages[0].content }}"


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, bulkrun.text.tokenizer, bulkrun.text.stop; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
