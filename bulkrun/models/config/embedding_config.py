"""What a model's files say of how a text becomes a vector: sentence-transformers' files beside config.json.

Torch-free. Without those files the transformer alone is known: the user says how its hidden states are pooled, and
vectors are normalized unless the user says otherwise, for what most do with them is to compare their directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError, UsageError
from bulkrun.models.config.common_facts import with_dtype
from bulkrun.models.config.config_file import parsed, read_config, read_object
from bulkrun.models.config.encoder_config import text_config
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.config.sentence_modules import MODULES, DenseConfig, read_modules
from bulkrun.settings import EmbeddingArgs, Pooling

PROMPTS_FILE = "config_sentence_transformers.json"
LENGTH_FILES = "sentence_*_config.json"  # sentence_bert_config.json, or with the name of another architecture
_MAX_TOKENS = 10**9  # what tokenizers write that know no limit is above
_OUTPUT = "last_hidden_state"  # of the transformer
_HARMLESS_ARGS = ("trust_remote_code", "revision", "cache_dir", "torch_dtype", "dtype", "attn_implementation")


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingConfig:
    """One model as a maker of vectors."""

    model: ModelConfig
    max_model_len: int  # tokens of a text unless the user asks for more, up to `model`'s positions
    pooling: Pooling | None  # None: no file tells
    normalize: bool
    dense: tuple[DenseConfig, ...]
    prompts: Mapping[str, str]  # by name: what some models want before a text
    default_prompt_name: str | None

    @property
    def dimensions(self) -> int:
        """Numbers of a vector: the model's hidden size, or what the last Dense module makes of it."""
        return self.dense[-1].out_features if self.dense else self.model.hidden_size

    def model_len(self, asked: int | None) -> int:
        """The longest text in tokens where `engine.max_model_len` is `asked`. Raises UsageError where that is too much.

        The files' own limit is a default: longer texts have positions too, and were only not trained with.
        """
        return self.max_model_len if asked is None else self.model.model_len(asked)

    def with_args(self, args: EmbeddingArgs) -> EmbeddingConfig:
        """The same with what a job says in place of what the files say; `pooling` is not None afterwards.

        Raises ModelError where neither says how to pool.
        """
        pooling = args.pooling or self.pooling
        if pooling is None:
            raise ModelError(
                f"embedding.pooling: the model's files do not say how a text's tokens become one vector (there is no "
                f"{MODULES}); set it to cls, mean or last, as the model's card says"
            )
        return replace(self, pooling=pooling, normalize=self.normalize if args.normalize is None else args.normalize)

    def vector_size(self, args: EmbeddingArgs) -> int:
        """How many numbers each vector has. Raises UsageError where `embedding.dimensions` is more than there are."""
        asked = args.dimensions
        if asked is not None and not 0 < asked <= self.dimensions:
            raise UsageError(
                f"embedding.dimensions: {asked} is not from 1 to the {self.dimensions} of the model's vectors"
            )
        return asked or self.dimensions

    @classmethod
    def from_dir(cls, path: Path | str, adapter: Path | None = None) -> EmbeddingConfig:
        """Read a model's directory. An `adapter` that sentence-transformers saved has all but config.json itself.

        Raises ModelError, naming the file, for what is broken or not supported.
        """
        path = Path(path)
        model = read_config(path, lambda raw: text_config(with_dtype(raw, path)))
        files = path if adapter is None or not (adapter / MODULES).is_file() else adapter
        modules = read_modules(files)
        prompts, default = _prompts(files / PROMPTS_FILE)
        dense = () if modules is None else modules.dense
        _check_chain(files, model.hidden_size, dense)
        return cls(
            model=model,
            max_model_len=min(model.max_position_embeddings, max_text_len(files)),
            pooling=None if modules is None else modules.pooling,
            normalize=modules is None or modules.normalize,
            dense=dense,
            prompts=prompts,
            default_prompt_name=default,
        )


def _check_chain(path: Path, hidden_size: int, dense: tuple[DenseConfig, ...]) -> None:
    """Raise ModelError unless each Dense module takes as many numbers as there are before it."""
    for one in dense:
        if one.in_features != hidden_size:
            raise ModelError(
                f"{one.path / 'config.json'}: in_features {one.in_features}, but what comes before it in "
                f"{path / MODULES} has {hidden_size}; download the model again"
            )
        hidden_size = one.out_features


def max_text_len(path: Path) -> int:
    """The tokens of a text that a model's files name: sentence-transformers' own, else the tokenizer's."""
    for file in sorted(path.glob(LENGTH_FILES)):
        given = parsed(file, read_object(file) or {}, lambda raw: _length_of(raw, path))
        if given is not None:
            return given
    file = path / "tokenizer_config.json"
    given = (read_object(file) or {}).get("model_max_length")
    return int(given) if isinstance(given, int | float) and 0 < given < _MAX_TOKENS else _MAX_TOKENS


def _length_of(raw: Mapping[str, Any], path: Path) -> int | None:
    """Its max_seq_length. Raises ModelError for keys that would make other vectors, were they passed over."""
    if raw.get("do_lower_case") and not (read_object(path / "tokenizer_config.json") or {}).get("do_lower_case"):
        raise ModelError(
            "do_lower_case true is not applied here; set it to false in this file and lower the texts in the job's "
            "template ({{ text | lower }})"
        )
    changed = sorted(set(raw.get("config_args") or {}) - {*_HARMLESS_ARGS})
    if changed:
        raise ModelError(f"config_args {', '.join(changed)}: not applied here; write them into config.json")
    output = ((raw.get("modality_config") or {}).get("text") or {}).get("method_output_name") or _OUTPUT
    if output != _OUTPUT:
        raise ModelError(f"method_output_name {output!r} is not supported; {_OUTPUT} is")
    given = raw.get("max_seq_length")
    if given is not None and not (isinstance(given, int) and given > 0):
        raise ModelError(f"max_seq_length {given!r} is not a number of tokens; fix it")
    return given


def _prompts(file: Path) -> tuple[Mapping[str, str], str | None]:
    return parsed(file, read_object(file) or {}, _parsed_prompts)


def _parsed_prompts(raw: Mapping[str, Any]) -> tuple[Mapping[str, str], str | None]:
    prompts = {str(name): str(text or "") for name, text in (raw.get("prompts") or {}).items()}
    default = raw.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"default_prompt_name {default!r} is none of the prompts ({', '.join(prompts) or 'none'})")
    return prompts, default
