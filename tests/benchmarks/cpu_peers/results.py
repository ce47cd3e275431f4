"""What the runs of a comparison come to: medians, ratios and a plain table. Knows no processes and no engines."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]  # what a peer prints, see `peer.result_line`
BUSY = 0.06  # a run during which others had more of the CPU is marked


def summary(runs: Sequence[Result]) -> Result:
    """Medians of one peer's runs; `others_cpu_share` is the worst, for one disturbed run can move a median."""
    wall_s = statistics.median(run["wall_s"] for run in runs)
    return {
        "wall_s": [run["wall_s"] for run in runs],
        "median_wall_s": wall_s,
        "median_cpu_s": statistics.median(run["cpu_s"] for run in runs),
        "output_tok_s": round(runs[0]["output_tokens"] / wall_s, 1),
        "total_tok_s": round(runs[0]["total_tokens"] / wall_s, 1),
        "load_s": statistics.median(run["load_s"] for run in runs),
        "peak_rss_mb": max(run["peak_rss_mb"] for run in runs),
        "others_cpu_share": max(run["others_cpu_share"] for run in runs),
        "versions": runs[0]["versions"],
    }


def ratios(summaries: dict[str, Result]) -> dict[str, float]:
    """How many times as fast as each peer we are; empty where we did not run."""
    if "bulkrun" not in summaries:
        return {}
    ours = summaries["bulkrun"]["median_wall_s"]
    return {peer: round(one["median_wall_s"] / ours, 2) for peer, one in summaries.items() if peer != "bulkrun"}


def table(summaries: dict[str, Result]) -> str:
    """The fastest first; `x static` and `x ours` are speeds, so more is faster."""
    header = [
        "peer",
        "wall s (min-max)",
        "CPU s",
        "out tok/s",
        "tok/s",
        "x static",
        "x ours",
        "load s",
        "RSS MB",
        "others",
    ]
    ordered = sorted(summaries.items(), key=lambda item: item[1]["median_wall_s"])
    rows = [header, *(_row(peer, one, summaries) for peer, one in ordered)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _row(peer: str, one: Result, summaries: dict[str, Result]) -> list[str]:
    wall_s, mark = one["median_wall_s"], " busy" if one["others_cpu_share"] > BUSY else ""
    return [
        peer,
        f"{wall_s:.2f} ({min(one['wall_s']):.2f}-{max(one['wall_s']):.2f})",
        f"{one['median_cpu_s']:.2f}",
        f"{one['output_tok_s']:.0f}",
        f"{one['total_tok_s']:.0f}",
        *(f"{summaries[to]['median_wall_s'] / wall_s:.2f}" if to in summaries else "-" for to in ("static", "bulkrun")),
        f"{one['load_s']:.1f}",
        str(one["peak_rss_mb"]),
        f"{one['others_cpu_share']:.0%}{mark}",
    ]
