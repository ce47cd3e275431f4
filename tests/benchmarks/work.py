"""Requests of a benchmark as every engine can read them: token ids in, a fixed number of tokens out, a JSON line each.

Standard library only, so that it also runs in the environment of a peer that has nothing of ours. The lines are those
of `bulkrun bench throughput --dataset`.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple


class Work(NamedTuple):
    """One request: its prompt and how many tokens it must generate, end-of-sequence ignored."""

    prompt_token_ids: list[int]
    num_output_tokens: int


def lognormal_lengths(
    count: int, *, median: int, sigma: float, longest: int, shortest: int = 4, rng: random.Random
) -> list[int]:
    """Shuffled lognormal lengths, taken at even quantiles so that every count gives the same shape."""
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / count) for i in range(count)]
    lengths = [min(longest, max(shortest, round(median * math.exp(sigma * q)))) for q in quantiles]
    rng.shuffle(lengths)
    return lengths


def write_work(path: Path, work: Iterable[Work]) -> None:
    """One JSON object a line."""
    lines = [json.dumps({"prompt_token_ids": prompt, "max_tokens": count}) for prompt, count in work]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_work(path: Path) -> list[Work]:
    """What `write_work` wrote."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [Work(row["prompt_token_ids"], row["max_tokens"]) for row in rows]


def longest_output_first(work: Sequence[Work]) -> list[int]:
    """Positions of the requests in the order that leaves the shortest tail to an engine that fills up free places."""
    return sorted(range(len(work)), key=lambda i: -work[i].num_output_tokens)
