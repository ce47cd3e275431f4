"""What the runs of several policies on the same requests come to: padding by cause, speed-up by cause. Arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bulkrun.launch.bench.measure import Measured
from bulkrun.launch.bench.workload import Work

_TIMELINE_BINS = 60


def median_run(rounds: Iterable[Measured]) -> Measured:
    """The run that took the median time; of an even number the quicker one of the two in the middle."""
    ordered = sorted(rounds, key=lambda run: run.wall_s)
    return ordered[(len(ordered) - 1) // 2]


def policy_facts(rounds: Sequence[Measured], work: Sequence[Work], max_num_seqs: int) -> dict[str, Any]:
    """Of the median run, with the fastest and the slowest. Only tokens that a request asked for count as output."""
    run, walls = median_run(rounds), [one.wall_s for one in rounds]
    wanted = _num_outputs(work)
    # a padded sequence computes to the end of its batch: beyond its own length it is as idle as an empty seat
    num_wasted = run.output_tokens - wanted
    return {
        "wall_s": round(run.wall_s, 3),
        "wall_min_s": round(min(walls), 3),
        "wall_max_s": round(max(walls), 3),
        "output_tok_s": round(wanted / run.wall_s, 1),
        "padding_share": round(1 - (run.num_busy - num_wasted) / run.num_held, 4),
        "slot_use": round((run.num_busy - num_wasted) / (len(run.widths) * max_num_seqs), 4),
        "latency_p50_s": round(run.latency_s(0.5), 3),
        "latency_p99_s": round(run.latency_s(0.99), 3),
        "steps": len(run.widths),
    }


def position_shares(run: Measured, work: Sequence[Work], max_num_seqs: int) -> dict[str, float]:
    """Where positions went: those computed, and one for each step that a seat computed nothing. The shares add up to 1.

    `needed`: of the requests themselves. `prompt_padding`: prompts as long as the longest of their batch.
    `ended_sequences`: computed for, or held by, a sequence that had ended. `empty_seats`: nobody's. `recomputed`: after
    a preemption. `computed_padding` is of the computed positions alone.
    """
    needed = _num_inputs(work) + _num_outputs(work) - len(work)  # the last token of an output is fed to no step
    prompt_padding = run.input_tokens - _num_inputs(work)
    output_padding = run.output_tokens - _num_outputs(work)
    num_empty = len(run.widths) * max_num_seqs - run.num_held
    total = run.num_positions + run.num_held - run.num_busy + num_empty
    counts = {
        "needed": needed,
        "prompt_padding": prompt_padding,
        "ended_sequences": output_padding + run.num_held - run.num_busy,
        "empty_seats": num_empty,
        "recomputed": run.num_positions - needed - prompt_padding - output_padding,
    }
    shares = {name: round(count / total, 4) for name, count in counts.items()}
    computed_padding = (prompt_padding + output_padding) / run.num_positions
    return {"positions": total, **shares, "computed_padding": round(computed_padding, 4)}


def speedup(rounds: Mapping[str, Sequence[Measured]]) -> dict[str, float | None]:
    """Continuous over padded, of the median runs, as a product of factors; shares are those of its logarithm.

    Three causes: `no_prompt_padding`, `no_output_padding` (`no_padding` is both) and `refilling`, which is again
    `fewer_steps` times `step_time`: a step of static over one of continuous, below 1 where that is wider and slower.
    `total_min` and `total_max`: of the rounds.
    """
    runs = {name: median_run(several) for name, several in rounds.items()}
    wall = {name: run.wall_s for name, run in runs.items()}
    totals = [one.wall_s / other.wall_s for one, other in zip(rounds["padded"], rounds["continuous"], strict=True)]
    causes = {
        "no_prompt_padding": wall["padded"] / wall["padded_outputs"],
        "no_output_padding": wall["padded_outputs"] / wall["static"],
        "refilling": wall["static"] / wall["continuous"],
    }
    no_padding = wall["padded"] / wall["static"]
    fewer_steps = len(runs["static"].widths) / len(runs["continuous"].widths)
    factors = {
        "total": wall["padded"] / wall["continuous"],
        "total_min": min(totals),
        "total_max": max(totals),
        "no_padding": no_padding,
        **causes,
        "fewer_steps": fewer_steps,
        "step_time": causes["refilling"] / fewer_steps,
    }
    shares = _log_shares({**causes, "no_padding": no_padding}, factors["total"])
    return {name: round(factor, 3) for name, factor in factors.items()} | shares


def _log_shares(factors: Mapping[str, float], total: float) -> dict[str, float | None]:
    """None where one of them slowed it down."""
    has_shares = total > 1 and min(factors.values()) >= 1
    return {
        f"share_{name}": round(math.log(factor) / math.log(total), 3) if has_shares else None
        for name, factor in factors.items()
    }


def timelines(runs: Mapping[str, Measured], max_num_seqs: int) -> dict[str, list[float]]:
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


def _num_inputs(work: Iterable[Work]) -> int:
    return sum(len(one.prompt_token_ids) for one in work)


def _num_outputs(work: Iterable[Work]) -> int:
    return sum(one.num_output_tokens for one in work)
