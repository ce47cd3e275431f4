"""Which models can be run, as data. Torch-free: reads configs, never weights.

Levels of models that generate: fast, the engine's own decoder; general, transformers' code around the engine's
attention and cache, right but slower. embed: encoders, for jobs of vectors, which decoders of both levels can do as
well. classify: any of these with a head for labels. unsupported: refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bulkrun.errors import ModelError
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.models.config.classification_config import ClassificationConfig, is_classifier
from bulkrun.models.config.config_file import read_object
from bulkrun.models.config.embedding_config import EmbeddingConfig
from bulkrun.models.config.encoder_config import TRIED_ENCODERS
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.find_model import BUNDLED_PREFIX, resolve_model
from bulkrun.models.config.general_config import TRIED, UNSUPPORTED
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.model_dir import generation_defaults, model_fingerprint
from bulkrun.models.config.sentence_modules import MODULES
from bulkrun.models.files.weight_files import refuse_missing_weights
from bulkrun.settings import Task

_COLUMNS = ("level", "architecture", "family", "notes")


def supported_models() -> dict[str, Any]:
    """The architectures of each level and the models that come with bulkrun."""
    rows = [("fast", name, family.models, family.notes) for name, family in FAMILIES.items()]
    rows += [("general", name, models, "compared with transformers in the tests") for name, models in TRIED.items()]
    rows += [("general", "any other decoder of transformers", "-", "compared with its own attention when it is loaded")]
    rows += [
        ("embed", kind, models, "vectors; as transformers' in the tests") for kind, models in TRIED_ENCODERS.items()
    ]
    rows += [("embed", "any other encoder of transformers", "-", "checked for what padding does when it is loaded")]
    rows += [
        ("classify", "*ForSequenceClassification", "any of these", "labels; its head is looked at when it is loaded")
    ]
    rows += [("unsupported", names, kind, why) for kind, (names, why) in UNSUPPORTED.items()]
    return {
        "architectures": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
        "bundled": sorted(BUNDLED_PREFIX + path.parent.name for path in BUNDLED_ROOT.glob("*/config.json")),
    }


def describe_model(name: str) -> dict[str, Any]:
    """What a model is. Raises ModelError when it cannot be found, or can neither generate, embed nor classify."""
    path = resolve_model(name, bundled_root=BUNDLED_ROOT, task="embed")
    classification = _classification(path)
    config, embedding = _configs(path) if classification is None else (classification.model, None)
    stored = config.stored_quantization if isinstance(config, DecoderConfig) else None
    return {
        "model": name,
        "directory": str(path),
        "architecture": config.architecture,
        "level": "classify" if classification is not None else _level(config, embedding),
        "layers": config.num_layers,
        "hidden size": config.hidden_size,
        "heads": _heads(config),
        **_states(config),
        "vocabulary": config.vocab_size,
        "max_model_len": _max_model_len(config, embedding or classification),
        "dtype": config.dtype,
        **({} if stored is None else {"weights": stored.summary}),
        **({} if embedding is None else {"vectors": _vectors(embedding)}),
        **({} if classification is None else {"labels": _labels(classification)}),
        "sampling defaults": generation_defaults(path),
        "fingerprint": model_fingerprint(path),
        **_without_weights(path),
    }


def _heads(config: ModelConfig) -> str:
    """Of queries, and of keys and values: as many kinds as layers have."""
    if not config.layers_kv:
        return "none"
    if config.latent_dim is not None:
        return f"{config.num_heads} query, a latent of {config.latent_dim} + {config.head_dim - config.latent_dim}"
    kinds = dict.fromkeys(f"{kv.num_heads} key/value of {kv.head_dim}" for kv in config.layers_kv)
    return f"{config.num_heads} query, {' or '.join(kinds)}"


def _states(config: ModelConfig) -> dict[str, str]:
    """What layers keep in the place of keys and values, where some do."""
    kind = config.recurrence if isinstance(config, DecoderConfig) else None
    if kind is None:
        return {}
    num_bytes = kind.bytes_per_sequence(4 if config.dtype == "float32" else 2)
    return {"states": f"of {sum(kind.layers)} layers, {num_bytes:,} bytes a row"}


def _without_weights(path: Path) -> dict[str, str]:
    """Why a model whose config.json is fine cannot be loaded all the same: its weights are not there, or a pickle."""
    try:
        refuse_missing_weights(path)
    except ModelError as error:
        return {"cannot be loaded": str(error)}
    return {}


def task_of_texts(path: Path) -> Task:
    """What a model directory is for, of the tasks that generate nothing: labels where it has a head for them."""
    return "embed" if _classification(path) is None else "classify"


def _max_model_len(config: ModelConfig, of_texts: EmbeddingConfig | ClassificationConfig | None) -> int:
    return config.max_position_embeddings if of_texts is None else of_texts.max_model_len


def _classification(path: Path) -> ClassificationConfig | None:
    """As what the model classifies; None where it has no head for that."""
    architectures = (read_object(path / "config.json") or {}).get("architectures") or ()
    if (path / MODULES).is_file():  # made for vectors, whatever it was made from
        return None
    return ClassificationConfig.from_dir(path) if any(map(is_classifier, architectures)) else None


def _labels(classification: ClassificationConfig) -> str:
    return f"{', '.join(classification.labels)}; activation {classification.activation or 'for the job to set'}"


def _configs(path: Path) -> tuple[ModelConfig, EmbeddingConfig | None]:
    """What the model is, and as what it embeds; None where it was not made for that."""
    try:
        config = ModelConfig.from_dir(path)
    except ModelError as error:
        try:
            embedding = EmbeddingConfig.from_dir(path)
        except ModelError:
            raise error from None
        return embedding.model, embedding
    return config, EmbeddingConfig.from_dir(path) if (path / MODULES).is_file() else None


def _level(config: ModelConfig, embedding: EmbeddingConfig | None) -> str:
    if isinstance(config, DecoderConfig) and config.is_causal:
        return "fast"
    return "general" if embedding is None else "embed"


def _vectors(embedding: EmbeddingConfig) -> str:
    """What a text becomes by the model's own files."""
    pooling = f"{embedding.pooling} pooling" if embedding.pooling else "the job has to set embedding.pooling"
    facts = [f"{embedding.dimensions} numbers", pooling]
    facts += ["normalized"] if embedding.normalize else []
    facts += [f"prompts {', '.join(embedding.prompts)}"] if embedding.prompts else []
    return ", ".join(facts)
