"""The batching policies on the same requests: what is gained by not padding, and what by refilling.

`padded` is the baseline of a batch that pads: each batch of `max_num_seqs` requests has all prompts and outputs as long
as its longest (the tokens are really computed, by this very engine); `padded_outputs` pads the outputs alone. `static`
leaves that out: an ended sequence costs nothing, but its seat stays empty. `dynamic` is static with an arrival window.
`continuous` fills the seat again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bulkrun.errors import UsageError
from bulkrun.launch.bench.comparison import median_run, policy_facts, position_shares, speedup, timelines
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.measure import Measured, run_workload, warm_up
from bulkrun.launch.bench.workload import Work, heavy_tailed_work, padded, poisson_arrivals
from bulkrun.settings import Batching

_DEFAULT_BATCHES = 4
_SLOWEST_RATE = 1 / 86_400
_POLICIES: tuple[Batching, ...] = ("static", "dynamic", "continuous")


@dataclass(frozen=True, slots=True)
class BatchingAsked:
    """How many requests (None: four batches), and how they come: `rate` per second (Poisson), None for all at once.

    `rounds`: how often each policy runs.
    """

    num_requests: int | None = None
    rate: float | None = None
    rounds: int = 1

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"--rate {self.rate}: not a number of requests per second above 0")
        if self.rate is not None and self.rate < _SLOWEST_RATE:
            raise UsageError(f"--rate {self.rate}: less than one request a day; it is requests per second")


def bench_batching(choice: ModelChoice, asked: BatchingAsked) -> dict[str, Any]:
    """Run the policies in turns on one loaded model. Needs at least two batches of requests."""
    loaded = load_for_bench(_without_sharing(choice))
    engine = loaded.engine
    num_requests = asked.num_requests or _DEFAULT_BATCHES * engine.max_num_seqs
    if num_requests <= engine.max_num_seqs:
        raise UsageError(
            f"--num-requests {num_requests} all fit into one batch of {engine.max_num_seqs}, so that policies "
            f"do not differ; give more requests or a smaller --max-num-seqs"
        )
    work = heavy_tailed_work(num_requests, vocab_size=loaded.config.vocab_size, max_model_len=engine.max_model_len)
    warm_up(engine, work)
    arrivals = None if asked.rate is None else poisson_arrivals(len(work), asked.rate)
    rounds = _rounds(loaded, work, arrivals, asked.rounds)
    runs = {name: median_run(several) for name, several in rounds.items()}
    return {
        "engine": "bulkrun",
        **choice.facts,
        **loaded.facts,
        "arrival": "offline" if arrivals is None else "poisson",
        "rate": asked.rate,
        "requests": len(work),
        "max_num_seqs": engine.max_num_seqs,
        "rounds": asked.rounds,
        "input_tokens": sum(len(one.prompt_token_ids) for one in work),
        "output_tokens": sum(one.num_output_tokens for one in work),
        "policies": {name: policy_facts(several, work, engine.max_num_seqs) for name, several in rounds.items()},
        "positions": {name: position_shares(run, work, engine.max_num_seqs) for name, run in runs.items()},
        "speedup": speedup(rounds) if arrivals is None else None,
        "timeline": timelines(runs, engine.max_num_seqs),
    }


def _without_sharing(choice: ModelChoice) -> ModelChoice:
    """The prompts have nothing in common; what an earlier policy computed must not serve a later one.

    Raises UsageError for settings that would count for nothing.
    """
    if "batching" in choice.settings:
        raise UsageError("engine.batching: every policy is measured here; leave it out")
    if choice.settings.get("enable_prefix_caching"):
        raise UsageError(
            "engine.enable_prefix_caching: it is off here, as every policy gets the same prompts; leave it out"
        )
    return ModelChoice(choice.model, choice.shape, {**choice.settings, "enable_prefix_caching": False})


def _rounds(
    loaded: LoadedModel, work: list[Work], arrivals: list[float] | None, num_rounds: int
) -> dict[str, list[Measured]]:
    """The runs of each policy by name, in turns. What pads only where requests come at once: its batches are known."""
    engine = loaded.engine
    runs: dict[str, list[Measured]] = {}
    for number in range(1, num_rounds + 1):
        place = f"round {number} of {num_rounds}"
        if arrivals is None:
            for name, pads_prompts in (("padded", True), ("padded_outputs", False)):
                engine.change_batching("static")
                longer = padded(work, engine.max_num_seqs, prompts=pads_prompts)
                run = run_workload(engine, longer, holds_seats=True, what=f"{place}, {name}")
                runs.setdefault(name, []).append(run)
        for batching in _POLICIES:
            engine.change_batching(batching)
            holds_seats = batching != "continuous"
            run = run_workload(engine, work, arrivals, holds_seats=holds_seats, what=f"{place}, {batching}")
            runs.setdefault(batching, []).append(run)
    return runs
