"""The batching policies on the same requests: what is gained by not padding, and what by refilling.

`padded` is the baseline of a batch that pads: each batch of `max_num_seqs` requests has all prompts and outputs as long
as its longest (the tokens are really computed, by this very engine). `static` leaves that out: an ended sequence costs
nothing, but its seat stays empty. `dynamic` is static with an arrival window. `continuous` fills the seat again.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bulkrun.errors import UsageError
from bulkrun.launch.bench.engine import LoadedModel, ModelChoice, load_for_bench
from bulkrun.launch.bench.measure import Measured, run_workload, warm_up
from bulkrun.launch.bench.workload import Work, heavy_tailed_work, padded, poisson_arrivals

if TYPE_CHECKING:
    from bulkrun.engine.batching import Batching

_DEFAULT_BATCHES = 4
_TIMELINE_BINS = 60


@dataclass(frozen=True, slots=True)
class BatchingAsked:
    """How many requests (None: four batches), and how they come: `rate` per second (Poisson), None for all at once."""

    num_requests: int | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise UsageError(f"--rate {self.rate}: not a number of requests per second above 0")


def bench_batching(choice: ModelChoice, asked: BatchingAsked) -> dict[str, Any]:
    """Run the policies one after another on one loaded model. Needs at least two batches of requests."""
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
    runs = _runs(loaded, work, arrivals)
    return {
        "engine": "bulkrun",
        **choice.facts,
        **loaded.facts,
        "arrival": "offline" if arrivals is None else "poisson",
        "rate": asked.rate,
        "requests": len(work),
        "max_num_seqs": engine.max_num_seqs,
        "input_tokens": sum(len(one.prompt_token_ids) for one in work),
        "output_tokens": sum(one.num_output_tokens for one in work),
        "policies": {name: _facts(run, work, engine.max_num_seqs) for name, run in runs.items()},
        "speedup": _speedup(runs),
        "timeline": _timelines(runs, engine.max_num_seqs),
    }


def _without_sharing(choice: ModelChoice) -> ModelChoice:
    """The prompts have nothing in common; what an earlier policy computed must not serve a later one."""
    return ModelChoice(choice.model, choice.shape, {**choice.settings, "enable_prefix_caching": False})


def _runs(loaded: LoadedModel, work: list[Work], arrivals: list[float] | None) -> dict[str, Measured]:
    """Each policy by name; the baseline only where requests come at once, for its batches must be known."""
    policies: tuple[Batching, ...] = ("static", "dynamic", "continuous")
    runs = {}
    if arrivals is None:
        loaded.engine.change_batching("static")
        longer = padded(work, loaded.engine.max_num_seqs)
        runs["padded"] = run_workload(loaded.engine, longer, holds_seats=True)
    for batching in policies:
        loaded.engine.change_batching(batching)
        runs[batching] = run_workload(loaded.engine, work, arrivals, holds_seats=batching != "continuous")
    return runs


def _facts(run: Measured, work: list[Work], max_num_seqs: int) -> dict[str, Any]:
    """Only tokens that a request asked for count as output."""
    wanted = sum(one.num_output_tokens for one in work)
    # a padded sequence computes to the end of its batch: beyond its own length it is as idle as an empty seat
    num_wasted = run.output_tokens - wanted
    return {
        "wall_s": round(run.wall_s, 3),
        "output_tok_s": round(wanted / run.wall_s, 1),
        "padding_share": round(1 - (run.num_busy - num_wasted) / run.num_held, 4),
        "slot_use": round((run.num_busy - num_wasted) / (len(run.widths) * max_num_seqs), 4),
        "latency_p50_s": round(run.latency_s(0.5), 3),
        "latency_p99_s": round(run.latency_s(0.99), 3),
        "steps": len(run.widths),
    }


def _speedup(runs: dict[str, Measured]) -> dict[str, float | None] | None:
    """Continuous over padded, as a product of two factors; shares are those of its logarithm."""
    if "padded" not in runs:
        return None
    no_padding = runs["padded"].wall_s / runs["static"].wall_s
    refilling = runs["static"].wall_s / runs["continuous"].wall_s
    total = no_padding * refilling
    has_shares = total > 1 and no_padding >= 1 and refilling >= 1
    return {
        "total": round(total, 3),
        "no_padding": round(no_padding, 3),
        "refilling": round(refilling, 3),
        "share_no_padding": round(math.log(no_padding) / math.log(total), 3) if has_shares else None,
        "share_refilling": round(math.log(refilling) / math.log(total), 3) if has_shares else None,
    }


def _timelines(runs: dict[str, Measured], max_num_seqs: int) -> dict[str, list[float]]:
    """Slot use over time, in equal bins of the longest run's time; 0 behind a run's end."""
    longest = max(run.wall_s for run in runs.values())
    return {name: timeline(run.widths, longest, max_num_seqs) for name, run in runs.items()}


def timeline(widths: list[tuple[float, int]], wall_s: float, max_num_seqs: int) -> list[float]:
    """The mean share of seats in use per bin; a step counts from the end of the one before it to its own."""
    bin_s, shares, previous = wall_s / _TIMELINE_BINS, [0.0] * _TIMELINE_BINS, 0.0
    for end, width in widths:
        for index in range(int(previous / bin_s), min(_TIMELINE_BINS, int(end / bin_s) + 1)):
            overlap = min(end, (index + 1) * bin_s) - max(previous, index * bin_s)
            shares[index] += max(0.0, overlap) / bin_s * width / max_num_seqs
        previous = end
    return [round(share, 3) for share in shares]
