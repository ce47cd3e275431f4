"""Whether all adapters of a job take the prompts that its model's tokenizer makes: a plan has one for all rows."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from bulkrun.errors import ModelError
from bulkrun.launch.preparation.adapter import TOKENIZERS, adapter_key, has_tokenizer
from bulkrun.text.tokenizer import Tokenizer

_FILES = ("*.j*", *TOKENIZERS)  # .json, .jinja, and what is neither of a tokenizer in an older form


def check_tokenizers(tokenizer: Tokenizer, adapters: Mapping[str, Path], *, has_template: bool) -> None:
    """Raise ModelError, naming the adapter, for one beside which another tokenizer than the model's lies.

    Trainers save the model's there, which is fine. `has_template`: the job names the chat template of all rows, so that
    theirs count for nothing.
    """
    found = dict[bytes, str]()  # what many adapters have alike is read once
    for name, adapter in adapters.items():
        if name and has_tokenizer(adapter):
            files = _digest(adapter)
            if files not in found:
                found[files] = _difference(tokenizer, Tokenizer.from_dir(adapter), has_template=has_template)
            if found[files]:
                raise ModelError(f"{adapter_key(name)}: {adapter} has {found[files]}")


def _difference(model: Tokenizer, adapter: Tokenizer, *, has_template: bool) -> str:
    """What an adapter's tokenizer has that the model's has not, and the way out; "" for nothing."""
    alone = "run its rows as a job of their own, with engine.adapter"
    if (model.definition, model.eos_token_id) != (adapter.definition, adapter.eos_token_id):
        return (
            f"another tokenizer than the model ({adapter.vocab_size:,} tokens, the model {model.vocab_size:,}); {alone}"
        )
    if not has_template and model.chat_template != adapter.chat_template:
        return f"another chat template than the model; name the one of all rows in prompt.chat_template, or {alone}"
    return ""


def _digest(folder: Path) -> bytes:
    """Of the files that say how texts become tokens, and of others of their kinds."""
    digest = blake2b(digest_size=16)
    for file in sorted({file for pattern in _FILES for file in folder.glob(pattern)}):
        digest.update(f"{file.name} {file.stat().st_size}|".encode("utf-8", "surrogateescape"))
        digest.update(file.read_bytes())
    return digest.digest()
