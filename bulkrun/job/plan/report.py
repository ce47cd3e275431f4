"""What a plan comes to, as numbers: the counters of a window, their sum, and the report that `bulkrun plan` shows.

Pure data; drawing it is the command line's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

# Upper borders (exclusive) of the token histogram: two buckets per octave; the last bucket is open.
HISTOGRAM_BORDERS = tuple(border for octave in range(2, 21) for border in (2**octave, 3 * 2 ** (octave - 1)))

_SHOWN_COLUMNS = 5


@dataclass
class PlanCounters:
    """Sums over the rows of a window, or of all windows. Token counts are of prompts unless they say otherwise.

    `prompt_tokens` counts every row, `unique_prompt_tokens` identical prompts once, and `shared_prefix_tokens` is how
    many of those a prefix cache saves at least. `expected_output_tokens` takes `max_tokens` for every generation.
    `undeclared_columns`: keys that first come after the sample of the input -> how often; their values are dropped.
    """

    rows: int = 0
    shards: int = 0
    prompt_tokens: int = 0
    unique_prompt_tokens: int = 0
    shared_prefix_tokens: int = 0
    expected_output_tokens: int = 0
    duplicate_prompts: int = 0
    max_prompt_tokens: int = 0
    too_long: int = 0
    truncated: int = 0
    empty: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    undeclared_columns: dict[str, int] = field(default_factory=dict)
    token_histogram: list[int] = field(default_factory=lambda: [0] * (len(HISTOGRAM_BORDERS) + 1))

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> PlanCounters:
        """The counters in a document that holds them beside other keys."""
        return cls(**{name: document[name] for name in cls.__dataclass_fields__})

    def add_errors(self, codes: Sequence[str]) -> None:
        """Count error rows by code."""
        self.errors = dict(sorted((Counter(self.errors) + Counter(codes)).items()))
        self.too_long = self.errors.get("too_long", 0)
        self.empty = self.errors.get("empty_prompt", 0)

    def add_lengths(self, lengths: npt.NDArray[np.int64]) -> None:
        """Count the prompts of rows that can run."""
        self.prompt_tokens += int(lengths.sum())
        self.max_prompt_tokens = max(self.max_prompt_tokens, int(lengths.max(initial=0)))
        buckets = np.searchsorted(HISTOGRAM_BORDERS, lengths, "right")
        counts = np.bincount(buckets, minlength=len(self.token_histogram))
        self.token_histogram = [int(old + new) for old, new in zip(self.token_histogram, counts, strict=True)]

    @classmethod
    def total(cls, windows: Sequence[PlanCounters]) -> PlanCounters:
        """The sum over windows."""
        total = cls()
        for window in windows:
            for name, value in vars(window).items():
                setattr(total, name, _added(name, getattr(total, name), value))
        return total


@dataclass(frozen=True)
class PlanReport:
    """A whole plan. `samples` are output rows (rows times `sampling.n`); `duplicate_ids` has `count` and `examples`
    (id and rows); `prompt` says how a row becomes a prompt."""

    counters: PlanCounters
    windows: int
    samples: int
    duplicate_ids: dict[str, Any]
    prompt: str

    def to_json(self) -> dict[str, Any]:
        """The document of `complete.json`."""
        totals = {"windows": self.windows, "samples": self.samples, "duplicate_ids": self.duplicate_ids}
        return {"prompt": self.prompt, **vars(self.counters), **totals, "histogram_borders": list(HISTOGRAM_BORDERS)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> PlanReport:
        """The report that `to_json` wrote."""
        totals = {name: document[name] for name in ("windows", "samples", "duplicate_ids")}
        return cls(PlanCounters.of(document), **totals, prompt=document["prompt"])

    def histogram(self) -> list[tuple[int, int | None, int]]:
        """(from, to exclusive or None, prompts) of the histogram from its first to its last bucket in use."""
        counts = self.counters.token_histogram
        used = [bucket for bucket, count in enumerate(counts) if count]
        lows, highs = (1, *HISTOGRAM_BORDERS), (*HISTOGRAM_BORDERS, None)
        return [(lows[b], highs[b], counts[b]) for b in range(min(used), max(used) + 1)] if used else []


def undeclared_lines(columns: Mapping[str, int]) -> list[str]:
    """Notes for the user about keys that came too late: one line each for the first few."""
    lines = [
        f"column {name!r} is neither in prompts nor in the output: it first comes after the sample of lines that "
        f"declares the columns, {times:,} times; put a line that has it at the start of an input file"
        for name, times in list(columns.items())[:_SHOWN_COLUMNS]
    ]
    more = len(columns) - len(lines)
    return [*lines, f"and so with {more:,} more columns"] if more else lines


def _added(name: str, total: Any, value: Any) -> Any:
    if name == "max_prompt_tokens":
        return max(total, value)
    if isinstance(value, list):
        return [old + new for old, new in zip(total, value, strict=True)]
    if isinstance(value, dict):
        return dict(sorted((Counter(total) + Counter(value)).items()))
    return total + value
