"""A model as a directory: what it is (fingerprint), what it suggests (generation defaults).

Torch-free, so that the job column's launcher can ask before anything heavy is loaded. Knows file names and JSON;
weights are never read here, only the headers of their files.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.models.config.embedding_config import LENGTH_FILES, PROMPTS_FILE
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.config.sentence_modules import MODULES, module_folders
from bulkrun.models.files.read_errors import read_errors
from bulkrun.models.files.safetensors_header import read_header, stored_places
from bulkrun.models.files.weight_files import ADAPTER

_FINGERPRINT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/default.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
_EMBEDDING_FILES = (MODULES, PROMPTS_FILE, LENGTH_FILES, "vocab.txt")  # patterns; where there are modules
# key of generation_config.json -> its value that changes nothing, beside those that are false
_NOT_APPLIED: Mapping[str, Any] = {
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "stop_strings": None,
    "min_length": None,
    "min_new_tokens": None,
    "no_repeat_ngram_size": None,
    "encoder_no_repeat_ngram_size": None,
    "encoder_repetition_penalty": 1,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "num_beams": 1,
    "penalty_alpha": None,
    "top_h": None,
    "typical_p": 1,
    "watermarking_config": None,
    "epsilon_cutoff": None,
    "eta_cutoff": None,
}
_BLOCKS, _BLOCK_BYTES = 16, 4096  # of each weights file, for its fingerprint
_WHOLE_BYTES = 2**29  # of an adapter's, under a second


def model_fingerprint(path: Path | str) -> str:
    """A hash of what a model is: configs, tokenizer, and each safetensors file's name, size, header and some blocks.

    Of a model that lists modules behind its transformer (modules.json), what lies in their folders belongs to it.

    Milliseconds even for huge weights: the headers hold every tensor's name, dtype, shape and place, and blocks spread
    over the file tell a fine-tuned model from its base. Raises ModelError for a torn safetensors file.
    """
    path = Path(path)
    digest = hashlib.blake2b(digest_size=16)
    for name in _FINGERPRINT_FILES:
        file = path / name
        if file.is_file():
            _update(digest, name, _bytes_of(file))
    _update_weights(digest, path)
    if (path / MODULES).is_file():
        _update_modules(digest, path)
    return digest.hexdigest()


def adapter_fingerprint(path: Path) -> str:
    """The same of a LoRA adapter's directory, with every byte of weights that are not huge: training may change a few.

    Raises ModelError for a torn safetensors file.
    """
    digest = hashlib.blake2b(digest_size=16)
    _update(digest, ADAPTER, _bytes_of(path / ADAPTER))
    _update(digest, "files", model_fingerprint(path).encode())
    for file in sorted(path.glob("*.safetensors")):
        if file.stat().st_size <= _WHOLE_BYTES:
            with read_errors(file), file.open("rb") as stream:
                _update(digest, file.name, hashlib.file_digest(stream, "blake2b").digest())
    return digest.hexdigest()


def tensors_fingerprint(path: Path) -> str:
    """A hash of the beginning of every tensor, for models of some hundred: where a head alone was trained anew over the
    same transformer, blocks of whole files may show nothing of it. Raises ModelError for a torn safetensors file."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(path.glob("*.safetensors")):
        with read_errors(file), file.open("rb") as stream:
            for name, (begin, end) in sorted(stored_places(file).items()):
                stream.seek(begin)
                _update(digest, name, stream.read(min(_BLOCK_BYTES, end - begin)))
    return digest.hexdigest()


def _update_weights(digest: hashlib.blake2b, folder: Path) -> None:
    for file in sorted(folder.glob("*.safetensors")):
        _update(digest, f"{file.name} {file.stat().st_size}", read_header(file))
        _update(digest, "blocks", _blocks(file))


def _update_modules(digest: hashlib.blake2b, path: Path) -> None:
    folders = module_folders(path)
    files = [file for pattern in _EMBEDDING_FILES for file in sorted(path.glob(pattern))]
    files += [folder / "config.json" for folder in folders if (folder / "config.json").is_file()]
    for file in files:
        _update(digest, file.relative_to(path).as_posix(), _bytes_of(file))
    for folder in folders:
        _update_weights(digest, folder)


def _blocks(file: Path) -> bytes:
    """A few KiB from places spread evenly over the file, its end included."""
    blocks = []
    with read_errors(file), file.open("rb") as stream:
        last = max(0, file.stat().st_size - _BLOCK_BYTES)
        for number in range(_BLOCKS):
            stream.seek(last * number // (_BLOCKS - 1))
            blocks.append(stream.read(_BLOCK_BYTES))
    return b"".join(blocks)


def _bytes_of(file: Path) -> bytes:
    with read_errors(file):
        return file.read_bytes()


def generation_defaults(path: Path | str) -> dict[str, Any]:
    """What generation_config.json suggests, under vLLM's names; empty where there is none.

    Keys: max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, eos_token_ids (always a list).
    Without `do_sample` the model is greedy, as in transformers: temperature is 0 and the filters are left out. Where
    the key is absent but a temperature is given, sampling is what was meant. Raises ModelError for a file that is
    no JSON object, and for ends that are no tokens.
    """
    raw, file = _generation_config(path), Path(path) / "generation_config.json"
    if raw is None:
        return {}
    defaults = dict(_defaults(raw))
    eos = defaults["eos_token_ids"]
    if eos is not None and not (isinstance(eos, list) and all(isinstance(token_id, int) for token_id in eos)):
        raise ModelError(f"{file}: eos_token_id: {eos!r} is neither a token id nor a list of them; fix or remove it")
    return {key: value for key, value in defaults.items() if value is not None}


def ignored_defaults(path: Path | str) -> list[str]:
    """The keys of generation_config.json that change outputs in transformers and are not applied here."""
    raw = _generation_config(path) or {}
    return [key for key, neutral in _NOT_APPLIED.items() if raw.get(key) and raw[key] != neutral]


def eos_token_ids(path: Path | str) -> tuple[int, ...]:
    """The tokens that end an output: those of generation_config.json, else those of config.json."""
    return tuple(generation_defaults(path).get("eos_token_ids") or ModelConfig.from_dir(path).eos_token_ids)


def _generation_config(path: Path | str) -> dict[str, Any] | None:
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return None
    try:
        raw = json.loads(_bytes_of(file).decode())
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not readable as JSON ({error}); fix or remove it") from None
    if not isinstance(raw, dict):
        raise ModelError(f"{file}: holds a {type(raw).__name__}, not an object; fix or remove it")
    return raw


def _defaults(raw: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield "max_tokens", raw.get("max_new_tokens")
    yield "repetition_penalty", raw.get("repetition_penalty")
    eos = raw.get("eos_token_id")
    yield "eos_token_ids", [eos] if isinstance(eos, int) else eos
    if not raw.get("do_sample", raw.get("temperature") is not None):
        yield "temperature", 0.0
        return
    for key in ("temperature", "top_k", "top_p", "min_p"):
        yield key, raw.get(key)


def _update(digest: hashlib.blake2b, name: str, content: bytes) -> None:
    """Feed name and content with their lengths, so that no two files can pass for one."""
    for part in (name.encode(), content):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
