"""Our engine as a peer: everything added at once, longest output first, as a job's plan would have it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.benchmarks.cpu_peers.peer import Generate, Options, run_peer
from tests.benchmarks.work import Work, longest_output_first

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bulkrun.engine.llm_engine import LLMEngine


def load(options: Options) -> Generate:
    """The engine with its defaults."""
    from bulkrun.launch.threads import settle_threads

    settle_threads()
    from bulkrun.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_model_dir(options.model, device="cpu", dtype=options.dtype)
    return lambda work: run_engine(engine, work)


def run_engine(engine: LLMEngine, work: Sequence[Work]) -> list[list[int]]:
    """Greedy output tokens of every request."""
    from bulkrun.request import Request, SamplingParams

    for i in longest_output_first(work):
        params = SamplingParams(max_tokens=work[i].num_output_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(str(i), work[i].prompt_token_ids, params))
    outputs: list[list[int]] = [[] for _ in work]
    while engine.has_unfinished():
        for completion in engine.step():
            outputs[int(completion.request_id)] = list(completion.token_ids)
    return outputs


if __name__ == "__main__":
    run_peer(load, "torch")
