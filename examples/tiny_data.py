"""The training data of `bundled:tiny`: pairs of (source, summary), split by whole modules, and their tokenizer.

Knows text and tokens; knows nothing of models. `train_tiny.py` trains on what stands here.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

INSTRUCTION = "Summarize this Python code in one sentence:\n"
SOURCE_CHARS = 400
MAX_SUMMARY_CHARS = 160
HELD_OUT_PERCENT = 2
VOCAB_SIZE = 4096
MAX_POSITIONS = 1024
IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}\n"
)


class Pair(NamedTuple):
    """One function or class, and the first sentences of what its author says about it."""

    module: str
    name: str
    source: str
    summary: str

    @property
    def prompt(self) -> str:
        """The user message, word for word what `jobs/summarize.yaml` renders."""
        return INSTRUCTION + self.source


class Split(NamedTuple):
    """Pairs to train on, and pairs of whole modules that training never sees."""

    train: list[Pair]
    held_out: list[Pair]


def summary_of(paragraph: str) -> str | None:
    """The whole sentences at the start of a docstring's first paragraph, without markup; None where it is no prose."""
    text = re.sub(r":[\w:+-]+:`[~!.]?(?:[^`<]*<)?([^`>]*)>?`", r"\1", paragraph)
    text = text.replace("``", "").replace("`", "").replace("**", "")
    text = re.split(r" (?:Args|Arguments|Parameters|Returns|Examples?|Note):", text)[0]
    if len(text) > MAX_SUMMARY_CHARS:
        end = max(text.rfind(mark, 0, MAX_SUMMARY_CHARS) for mark in (". ", "; "))
        text = text[: end + 1] if end > 0 else ""
    text = text.rstrip(" .;:") + "."
    is_prose = len(text.split()) >= 3 and sum(char.isalpha() or char == " " for char in text) > 0.8 * len(text)
    starts_well = text[:1].isupper() and not re.match(
        r"(Args|Arguments|Parameters|Returns?|Note|Examples?)\s*:|[\w.]+\(", text
    )
    return text if is_prose and starts_well and text.isascii() else None


def squeezed(source: str) -> str:
    """`source` without its whitespace: equal for what only formatting tells apart."""
    return "".join(source.split())


def is_held_out(module: str) -> bool:
    """Whether all of `module` stays out of training, decided by a hash of its name."""
    return int.from_bytes(hashlib.blake2b(module.encode(), digest_size=8).digest()) % 100 < HELD_OUT_PERCENT


def read_split(functions: Path) -> Split:
    """The distinct pairs of `extract_functions.py`'s Parquet; sources that occur on both sides leave training."""
    table = pq.read_table(functions, columns=["module", "name", "source", "docstring"]).drop_null()
    split, seen = Split([], []), set()
    for row in table.to_pylist():
        summary = summary_of(row["docstring"])
        key = (squeezed(row["source"][:SOURCE_CHARS]), summary)
        if summary is None or key in seen:
            continue
        seen.add(key)
        pair = Pair(row["module"], row["name"], row["source"][:SOURCE_CHARS], summary)
        (split.held_out if is_held_out(pair.module) else split.train).append(pair)
    held_out_sources = {squeezed(pair.source) for pair in split.held_out}
    return Split([pair for pair in split.train if squeezed(pair.source) not in held_out_sources], split.held_out)


def train_tokenizer(pairs: list[Pair]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens with a ChatML template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    turns = (f"user\n{pair.prompt}\nassistant\n{pair.summary}" for pair in pairs)
    tokenizer.train_from_iterator(turns, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def prompt_text(tokenizer: PreTrainedTokenizerFast, pair: Pair) -> str:
    """`pair`'s prompt after the chat template: where generation starts."""
    messages = [{"role": "user", "content": pair.prompt}]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[list[int]]:
    """Token ids of each text, nothing added."""
    return tokenizer(texts, add_special_tokens=False)["input_ids"]
