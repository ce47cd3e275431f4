"""The engine of a job: its model and settings, and the text side's tools that it is handed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.preparation.prepare import PreparedJob
from bulkrun.launch.threads import bound_spinning
from bulkrun.models.config.model_dir import eos_token_ids
from bulkrun.request import Engine
from bulkrun.settings import ClassificationArgs, EmbeddingArgs
from bulkrun.text.tokenizer import Tokenizer


def engine_factory(prepared: PreparedJob) -> Callable[[str], Engine]:
    """A function that loads the job's engine with the adapter of a name, "" for rows that name none; loading is when
    torch is imported."""
    spec, model_dir, adapters = prepared.spec, prepared.model_dir, prepared.adapters
    if not spec.generates:
        separator = prepared.tokenizer.pair_separator
        output = spec.embedding.to_args() if spec.task == "embed" else spec.classification.to_args(separator)
        load = partial(load_embedding_engine, model_dir, spec.engine, output)
        return lambda name: _of_job(load(adapters.get(name)), spec)
    return lambda name: load_engine(model_dir, prepared.tokenizer, spec.engine, adapters.get(name))


def _of_job(engine: Engine, spec: JobSpec) -> Engine:
    """The engine, for prompts of several texts too where the job's are."""
    if spec.several is None:
        return engine
    from bulkrun.engine.parts_engine import PartsEngine

    return PartsEngine(engine, spec.several)


def load_engine(model_dir: Path, tokenizer: Tokenizer, engine: EngineSpec, adapter: Path | None = None) -> Engine:
    """Load a model, with the adapter of that directory if there is one; this imports torch.

    The end that the tokenizer names ends an output too, as in vLLM: who teaches a model to end its turns changes the
    tokenizer and the chat template, and may forget generation_config.json. Raises ModelError, and UsageError for
    settings that cannot work.
    """
    bound_spinning()
    from bulkrun.engine.llm_engine import LLMEngine
    from bulkrun.text.constraint import token_constraint_factory
    from bulkrun.text.stop import stop_matcher_factory

    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return LLMEngine.from_model_dir(
        model_dir,
        stop_matcher_factory=stop_matcher_factory(tokenizer),
        constraint_factory=token_constraint_factory(tokenizer, {*eos_token_ids(model_dir), *own}),
        more_eos_token_ids=own,
        **_settings(engine, adapter),
    )


def load_embedding_engine(
    model_dir: Path, engine: EngineSpec, output: EmbeddingArgs | ClassificationArgs, adapter: Path | None = None
) -> Engine:
    """Load a model that makes vectors or scores of texts, with its adapter if there is one; this imports torch.

    Raises ModelError, and UsageError for settings that cannot work.
    """
    bound_spinning()
    from bulkrun.engine.embedding_engine import EmbeddingEngine

    return EmbeddingEngine.from_model_dir(model_dir, output, **_settings(engine, adapter))


def _settings(engine: EngineSpec, adapter: Path | None) -> dict[str, Any]:
    """The keys of the engine's `EngineArgs` that are set; of the adapter it is told the directory."""
    return {**engine.model_dump(exclude_none=True, exclude={"adapters"}), "adapter": adapter}


def check_device(engine: EngineSpec) -> None:
    """Raise UsageError where a GPU is asked for that is not there. Imports torch then, and only then."""
    if engine.device == "cuda":
        from bulkrun.engine.device import resolve_device

        resolve_device(engine.device)
