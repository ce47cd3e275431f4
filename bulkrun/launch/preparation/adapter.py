"""The adapters of a job: their directories, and whose tokenizer counts."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.models.config.find_model import ADAPTER_KEY, resolve_adapter

# One of these is a whole tokenizer, which a trainer may have saved in its older form.
TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"
)  # fmt: skip


def adapter_dir(engine: EngineSpec) -> Path | None:
    """Where the adapter lies, None where there is none. Raises ModelError for one that cannot be found or used."""
    return None if engine.adapter is None else resolve_adapter(engine.adapter)


def adapter_dirs(engine: EngineSpec) -> dict[str, Path]:
    """Where each adapter lies, by its name; "" is that of the one of all rows. Raises what `adapter_dir` raises."""
    if (of_all := adapter_dir(engine)) is not None:
        return {"": of_all}
    return {name: resolve_adapter(where, adapter_key(name)) for name, where in engine.adapters.items()}


def adapter_key(name: str) -> str:
    """Where a job has the adapter of that name."""
    return f"engine.adapters.{name}" if name else ADAPTER_KEY


def has_tokenizer(adapter: Path) -> bool:
    """Whether one lies beside the adapter."""
    return any((adapter / name).is_file() for name in TOKENIZERS)


def tokenizer_dir(model_dir: Path, adapter: Path | None) -> Path:
    """The directory whose tokenizer and chat template count: the adapter's, which were there in training, if it has
    them, else the model's."""
    return adapter if adapter is not None and has_tokenizer(adapter) else model_dir
