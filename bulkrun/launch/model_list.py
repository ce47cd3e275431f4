"""Which models can be run, as data. Torch-free: reads configs, never weights.

Three levels. fast: the engine's own decoder. general: transformers' code around the engine's attention and cache, right
but slower. unsupported: refused by name.
"""

from __future__ import annotations

from typing import Any

from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.general_config import TRIED, UNSUPPORTED
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.model_dir import BUNDLED_PREFIX, generation_defaults, model_fingerprint, resolve_model

_COLUMNS = ("level", "architecture", "family", "notes")


def supported_models() -> dict[str, Any]:
    """The architectures of each level and the models that come with bulkrun."""
    rows = [("fast", name, family.models, family.notes) for name, family in FAMILIES.items()]
    rows += [("general", name, models, "compared with transformers in the tests") for name, models in TRIED.items()]
    rows += [("general", "any other decoder of transformers", "-", "compared with its own attention when it is loaded")]
    rows += [("unsupported", names, kind, why) for kind, (names, why) in UNSUPPORTED.items()]
    return {
        "architectures": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
        "bundled": sorted(BUNDLED_PREFIX + path.parent.name for path in BUNDLED_ROOT.glob("*/config.json")),
    }


def describe_model(name: str) -> dict[str, Any]:
    """What a model is. Raises ModelError when it cannot be found or cannot be run."""
    path = resolve_model(name, bundled_root=BUNDLED_ROOT)
    config = ModelConfig.from_dir(path)
    stored = config.stored_quantization if isinstance(config, DecoderConfig) else None
    return {
        "model": name,
        "directory": str(path),
        "architecture": config.architecture,
        "level": "fast" if isinstance(config, DecoderConfig) else "general",
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": f"{config.num_heads} query, {config.num_kv_heads} key/value of {config.head_dim}",
        "vocabulary": config.vocab_size,
        "max_model_len": config.max_position_embeddings,
        "dtype": config.dtype,
        **({} if stored is None else {"weights": stored.summary}),
        "sampling defaults": generation_defaults(path),
        "fingerprint": model_fingerprint(path),
    }
