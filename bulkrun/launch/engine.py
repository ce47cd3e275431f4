"""The engine of a job: its model and settings, and the text side's tools that it is handed."""

from __future__ import annotations

from collections.abc import Callable

from bulkrun.launch.prepare import PreparedJob
from bulkrun.launch.threads import settle_threads
from bulkrun.request import Engine


def engine_factory(prepared: PreparedJob) -> Callable[[], Engine]:
    """A function that loads the job's engine; loading is when torch is imported."""

    def make_engine() -> Engine:
        settle_threads()
        from bulkrun.engine.llm_engine import LLMEngine
        from bulkrun.text.stop import stop_matcher_factory

        settings = prepared.spec.engine.model_dump(exclude_none=True)
        matchers = stop_matcher_factory(prepared.tokenizer)
        return LLMEngine.from_model_dir(prepared.model_dir, stop_matcher_factory=matchers, **settings)

    return make_engine
