"""The adapter of a job: its directory, and whose tokenizer counts."""

from __future__ import annotations

from pathlib import Path

from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.models.config.find_model import resolve_adapter

_TOKENIZER = "tokenizer.json"


def adapter_dir(engine: EngineSpec) -> Path | None:
    """Where the adapter lies, None where there is none. Raises ModelError for one that cannot be found or used."""
    return None if engine.adapter is None else resolve_adapter(engine.adapter)


def tokenizer_dir(model_dir: Path, adapter: Path | None) -> Path:
    """The directory whose tokenizer and chat template count: the adapter's, which were there in training, if it has
    them, else the model's."""
    return adapter if adapter is not None and (adapter / _TOKENIZER).is_file() else model_dir
