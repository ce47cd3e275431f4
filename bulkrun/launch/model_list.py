"""Which models can be run, as data. Torch-free: reads configs, never weights."""

from __future__ import annotations

from typing import Any

from bulkrun.launch.prepare import BUNDLED_ROOT
from bulkrun.models.config import ModelConfig
from bulkrun.models.families import FAMILIES
from bulkrun.models.model_dir import BUNDLED_PREFIX, generation_defaults, model_fingerprint, resolve_model


def supported_models() -> dict[str, Any]:
    """The architectures that run and the models that come with bulkrun."""
    rows = [(name, family.models, family.notes) for name, family in FAMILIES.items()]
    return {
        "architectures": [dict(zip(("architecture", "family", "notes"), row, strict=True)) for row in rows],
        "bundled": sorted(BUNDLED_PREFIX + path.parent.name for path in BUNDLED_ROOT.glob("*/config.json")),
    }


def describe_model(name: str) -> dict[str, Any]:
    """What a model is. Raises ModelError when it cannot be found or cannot be run."""
    path = resolve_model(name, bundled_root=BUNDLED_ROOT)
    config = ModelConfig.from_dir(path)
    return {
        "model": name,
        "directory": str(path),
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": f"{config.num_heads} query, {config.num_kv_heads} key/value of {config.head_dim}",
        "vocabulary": config.vocab_size,
        "max_model_len": config.max_position_embeddings,
        "dtype": config.dtype,
        "sampling defaults": generation_defaults(path),
        "fingerprint": model_fingerprint(path),
    }
