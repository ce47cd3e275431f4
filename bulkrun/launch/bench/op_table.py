"""What the device's time went into: a row per op, and the share of time it did nothing. Arithmetic; torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from bulkrun.launch.bench.ceilings import DeviceRates
from bulkrun.launch.bench.device_trace import Busy
from bulkrun.launch.bench.op_costs import OpCall, OpCost

OTHER = "other"  # work that is none of the ops recorded: embedding, positions, copies
_BY_ROWS = ("_proj", "lm_head", "router", "experts")  # a product's rate depends on its rows


@dataclass(slots=True)
class _Row:
    seconds_of: dict[int | None, float] = field(default_factory=dict)  # by call
    least: int = 0
    most: int = 0
    flops: float = 0.0
    num_bytes: float = 0.0
    least_s: float = 0.0  # by the ceiling that binds each call

    @property
    def seconds(self) -> float:
        return sum(self.seconds_of.values())

    def count(self, call: OpCall, rates: DeviceRates) -> None:
        self.least = min(self.least, call.rows) if self.most else call.rows
        self.most = max(self.most, call.rows)
        cost = call.cost
        self.flops, self.num_bytes = self.flops + cost.flops, self.num_bytes + cost.num_bytes
        self.least_s += max(cost.flops / rates.gemm_flop_s, cost.num_bytes / rates.read_bytes_s)


def op_table(work: Sequence[Busy], calls: Sequence[OpCall], rates: DeviceRates) -> list[dict[str, Any]]:
    """One row per op, and for products per row count (powers of two); the longest total time first.

    `share_of_ceiling`: the least seconds the measured rates allow, over those it took. `share_of_time`: of the
    seconds the device worked. `median_us`: of a call; far below the mean where other processes took the CPU away.
    """
    rows: dict[tuple[str, int], _Row] = {}
    for busy in work:
        call = OpCall(OTHER, 0, OpCost()) if busy.call is None else calls[busy.call].part(busy.name)
        row = rows.setdefault((call.name, _bucket(call)), _Row())
        if busy.call not in row.seconds_of:
            row.count(call, rates)
        row.seconds_of[busy.call] = row.seconds_of.get(busy.call, 0.0) + busy.end_s - busy.start_s
    total_s = sum(row.seconds for row in rows.values())
    ordered = sorted(rows.items(), key=lambda item: -item[1].seconds)
    return [_facts(name, row, total_s) for (name, _), row in ordered if row.seconds > 0]


def _bucket(call: OpCall) -> int:
    """Row counts up to the same power of two go together."""
    return (call.rows - 1).bit_length() if call.name.endswith(_BY_ROWS) else 0


def _facts(name: str, row: _Row, total_s: float) -> dict[str, Any]:
    is_op = name != OTHER
    return {
        "op": name,
        "rows": None if not is_op else str(row.most) if row.least == row.most else f"{row.least}-{row.most}",
        "calls": len(row.seconds_of) if is_op else None,
        "seconds": round(row.seconds, 6),
        "median_us": round(median(row.seconds_of.values()) * 1e6, 2) if is_op else None,
        "share_of_time": round(row.seconds / total_s, 4),
        "tflop_s": round(row.flops / row.seconds / 1e12, 4) if row.flops else None,
        "gb_s": round(row.num_bytes / row.seconds / 1e9, 2) if row.num_bytes else None,
        "share_of_ceiling": round(row.least_s / row.seconds, 4) if row.least_s else None,
    }


def idle_shares(work: Sequence[Busy]) -> dict[str, Any] | None:
    """The share of the time between the starts of the first and the last step in which the device did nothing.

    `between_steps`: gaps after which another step's work begins; `inside_steps`: the others. None with fewer than two
    steps in the trace.
    """
    starts: dict[int, float] = {}
    for busy in work:
        if busy.step is not None:
            starts.setdefault(busy.step, busy.start_s)
    if len(starts) < 2:
        return None
    first, last = min(starts.values()), max(starts.values())
    inside_s, between_s = _gaps([busy for busy in work if first <= busy.start_s <= last])
    wall_s = last - first
    return {
        "share": round((inside_s + between_s) / wall_s, 4),
        "between_steps": round(between_s / wall_s, 4),
        "inside_steps": round(inside_s / wall_s, 4),
        "steps": len(starts) - 1,
        "wall_s": round(wall_s, 6),
    }


def _gaps(work: Sequence[Busy]) -> tuple[float, float]:
    """Seconds in which nothing ran: inside a step, and before another one's work."""
    inside_s = between_s = 0.0
    busy_until, step = work[0].end_s, work[0].step
    for busy in work[1:]:
        gap = max(0.0, busy.start_s - busy_until)
        if busy.step == step:
            inside_s += gap
        else:
            between_s += gap
        busy_until, step = max(busy_until, busy.end_s), busy.step
    return inside_s, between_s
