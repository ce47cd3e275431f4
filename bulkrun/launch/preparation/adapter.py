"""The adapter of a job: its directory, and whose tokenizer counts."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.models.config.find_model import resolve_adapter

# One of these is a whole tokenizer, which a trainer may have saved in its older form.
_TOKENIZERS = (
    "tokenizer.json", "tokenizer.model", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"
)  # fmt: skip


def adapter_dir(engine: EngineSpec) -> Path | None:
    """Where the adapter lies, None where there is none. Raises ModelError for one that cannot be found or used."""
    return None if engine.adapter is None else resolve_adapter(engine.adapter)


def tokenizer_dir(model_dir: Path, adapter: Path | None) -> Path:
    """The directory whose tokenizer and chat template count: the adapter's, which were there in training, if it has
    them, else the model's."""
    has_own = adapter is not None and any((adapter / name).is_file() for name in _TOKENIZERS)
    return adapter if adapter is not None and has_own else model_dir
