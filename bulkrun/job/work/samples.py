"""From the outcomes of a row's generations to its samples: all of them, or the best (`sampling.best_of`).

Also what they cost and what was saved. Knows records; knows no files, tables or engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bulkrun.job.store.journal import JournalRecord

Outcomes = Mapping[tuple[int, int], JournalRecord]


@dataclass(frozen=True, slots=True)
class Spent:
    """Sums over a shard's generations, those included that are not kept.

    Tokens count for every row that a generation answers. `saved_generations` were not run because a row with the same
    prompt was, `cached_tokens` are prompt tokens that the prefix cache held.
    """

    prompt_tokens: int
    completion_tokens: int
    saved_generations: int
    cached_tokens: int


def keep_samples(
    rows: Sequence[int], outcomes: Outcomes, samples: int, best_of: int | None = None
) -> list[tuple[int, int, JournalRecord]]:
    """(row, sample, record) of every output row, in the order of `rows`: all generations, or the best first.

    Best is the highest cumulative log-probability, of equal ones the earlier generation; failed ones come last.
    """
    kept = []
    for row in rows:
        records = [outcomes[row, generation] for generation in range(best_of or samples)]
        if best_of is not None:
            records.sort(key=_rank)  # stable: equal ones stay in their order
        kept += [(row, sample, record) for sample, record in enumerate(records[:samples])]
    return kept


def _rank(record: JournalRecord) -> tuple[bool, float]:
    logprob = record.extra.get("cumulative_logprob")
    return record.error_code is not None, math.inf if logprob is None else -logprob


def spent(outcomes: Outcomes) -> Spent:
    """The cost of the generations. Rows that one generation answered share its record."""
    every = outcomes.values()
    once = {id(record): record for record in every}.values()
    return Spent(
        prompt_tokens=sum(record.prompt_tokens for record in every),
        completion_tokens=sum(record.completion_tokens for record in every),
        saved_generations=len(every) - len(once),
        cached_tokens=sum(record.cached_tokens for record in once),
    )
