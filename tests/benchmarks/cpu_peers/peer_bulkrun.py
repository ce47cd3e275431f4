"""Our engine as a peer: everything added at once, longest output first, as a job's plan would have it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tests.benchmarks.cpu_peers.peer import GREEDY, ROUNDED_INPUTS, Generate, Options, Sampling, run_peer
from tests.benchmarks.work import Work, longest_output_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bulkrun.engine.llm_engine import LLMEngine


def load(options: Options) -> Generate:
    """The engine with its defaults."""
    from bulkrun.launch.threads import bound_spinning

    bound_spinning()
    from bulkrun.engine.llm_engine import LLMEngine

    if options.schema is None:
        engine = LLMEngine.from_model_dir(options.model, **_settings(options))
        return lambda work: run_engine(engine, work, options.sampling)
    return _load_for_documents(options, json.dumps(options.schema))


def _settings(options: Options) -> dict[str, Any]:
    quantization = "int8" if options.dtype in ROUNDED_INPUTS else None
    return {"device": "cpu", "dtype": options.computed_in, "quantization": quantization}


def _load_for_documents(options: Options, schema: str) -> Generate:
    from bulkrun.engine.llm_engine import LLMEngine
    from bulkrun.request import StructuredOutput
    from bulkrun.text.constraint import token_constraint_factory
    from bulkrun.text.tokenizer import Tokenizer

    constraints = token_constraint_factory(Tokenizer.from_dir(options.model))
    engine = LLMEngine.from_model_dir(options.model, constraint_factory=constraints, **_settings(options))
    return lambda work: run_engine(
        engine, work, options.sampling, ignore_eos=False, structured_outputs=StructuredOutput("json", schema)
    )


def run_engine(
    engine: LLMEngine, work: Sequence[Work], sampling: Sampling = GREEDY, *, ignore_eos: bool = True, **more: Any
) -> list[list[int]]:
    """Output tokens of every request; `more` are further sampling parameters."""
    from bulkrun.request import Request, SamplingParams

    for i in longest_output_first(work):
        limits = {"max_tokens": work[i].num_output_tokens, "ignore_eos": ignore_eos}
        params = SamplingParams(**limits, **asdict(sampling), **more)
        engine.add_request(Request(str(i), work[i].prompt_token_ids, params, seed=i))
    outputs: list[list[int]] = [[] for _ in work]
    while engine.has_unfinished():
        for completion in engine.step():
            outputs[int(completion.request_id)] = list(completion.token_ids)
    return outputs


if __name__ == "__main__":
    run_peer(load, "torch")
