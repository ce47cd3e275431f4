"""The engine of a job: its model and settings, and the text side's tools that it is handed."""

from __future__ import annotations

from collections.abc import Callable

from bulkrun.launch.prepare import PreparedJob
from bulkrun.launch.threads import settle_threads
from bulkrun.models.model_dir import generation_defaults
from bulkrun.request import Engine


def engine_factory(prepared: PreparedJob) -> Callable[[], Engine]:
    """A function that loads the job's engine; loading is when torch is imported."""

    def make_engine() -> Engine:
        settle_threads()
        from bulkrun.engine.llm_engine import LLMEngine
        from bulkrun.text.constraint import token_constraint_factory
        from bulkrun.text.stop import stop_matcher_factory

        settings = prepared.spec.engine.model_dump(exclude_none=True)
        return LLMEngine.from_model_dir(
            prepared.model_dir,
            stop_matcher_factory=stop_matcher_factory(prepared.tokenizer),
            constraint_factory=token_constraint_factory(prepared.tokenizer, eos_token_ids(prepared)),
            **settings,
        )

    return make_engine


def eos_token_ids(prepared: PreparedJob) -> list[int]:
    """The tokens that end an output, as the engine reads them from the model's files."""
    return generation_defaults(prepared.model_dir).get("eos_token_ids") or list(prepared.model.eos_token_ids)
