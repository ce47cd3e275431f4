"""A run's report as one HTML page: no scripts, nothing from elsewhere, and what a model or a row said is only text.

It opens from a disk, prints, and follows the reader's light or dark. What facts and tables there are is the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from bulkrun.job.views.report import Lengths, Timeline

_TEMPLATE = Path(__file__).with_name("report_page.html.jinja")


@dataclass(frozen=True)
class Bar:
    """Heights are of 100; `label` is shown to who points at it."""

    label: str
    height: float
    failed: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Bars beside each other; `first` and `last` say where the axis begins and ends."""

    title: str
    bars: Sequence[Bar]
    first: str
    last: str


def page(
    title: str,
    facts: Mapping[str, str],
    charts: Sequence[Chart],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[Any]]]],
    visible: Callable[[Any], str],
) -> str:
    """The page. A table is a title, names of columns and rows.

    `visible` makes a value a text of printable characters, as a terminal shows it.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["visible"] = visible
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(title=visible(title), facts=facts, charts=charts, tables=tables)


def chart_of_timeline(found: Timeline) -> Chart:
    """Rows per interval; those that failed are at the bottom."""
    most = max(found.rows) or 1
    bars = [
        Bar(
            f"{number * found.interval_s:,.0f} s: {rows:,} rows, {failed:,} failed",
            100 * rows / most,
            100 * failed / most,
        )
        for number, (rows, failed) in enumerate(zip(found.rows, found.error_rows, strict=True))
    ]
    return Chart(
        f"Rows committed in each {found.interval_s:,.0f} s",
        bars,
        found.began,
        f"after {len(found.rows) * found.interval_s:,.0f} s",
    )


def chart_of_lengths(found: Lengths) -> Chart:
    """Rows by their number of tokens."""
    most, width = max(found.bins), found.bin_tokens
    bars = [
        Bar(f"{number * width:,} to {(number + 1) * width - 1:,} tokens: {rows:,} rows", 100 * rows / most)
        for number, rows in enumerate(found.bins)
    ]
    return Chart(found.column.replace("_", " ").capitalize(), bars, "0", f"{len(bars) * width:,}")
