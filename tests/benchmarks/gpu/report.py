"""The results as markdown tables for README and LOG: what was asked, predicted, measured. Knows no measuring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tests.benchmarks.gpu.results import Line

_ERROR = 300  # characters of a traceback, whose end says what happened
_HEADER = ("what", "requests", "figure", "target", "predicted", "measured", "total tok/s", "output tok/s", "idle")


def report_parts(lines: Sequence[Line]) -> list[str]:
    """What it was measured on; a table per stage, a row per prediction; and op by op where the time went, for what was
    traced."""
    stages = list(dict.fromkeys(line["stage"] for line in lines))
    parts = [f"## measured on\n\n{_hardware(lines)}"]
    parts += [f"## {stage}\n\n{table(_HEADER, _rows(stage, lines))}" for stage in stages]
    for line in lines:
        if ops := line.get("facts", {}).get("ops"):
            parts.append(f"## ops of {line['name']}\n\n{table(tuple(ops[0]), (tuple(op.values()) for op in ops))}")
    return parts


def _hardware(lines: Sequence[Line]) -> str:
    """One line per machine and commit, with the stages measured there: compare times within one."""
    stages: dict[str, list[str]] = {}
    for line in lines:
        told = ", ".join(f"{name} {value}" for name, value in line["hardware"].items())
        if "facts" in line and line["stage"] not in stages.setdefault(told, []):
            stages[told].append(line["stage"])
    return "\n".join(f"- {told or 'unknown'}: {', '.join(names)}" for told, names in stages.items() if names)


def _rows(stage: str, lines: Sequence[Line]) -> Iterator[tuple[Any, ...]]:
    facts_of = {line["name"]: line["facts"] for line in lines if line["stage"] == stage and "facts" in line}
    for line in (line for line in lines if line["stage"] == stage):
        facts = line.get("facts", {})
        speeds = facts.get("total_tok_s"), facts.get("output_tok_s"), (facts.get("idle") or {}).get("share")
        if "facts" not in line:
            yield line["name"], None, line.get("skipped") or f"failed: {line.get('error', '')[-_ERROR:]}"
        elif not line["predictions"]:
            yield line["name"], facts.get("requests"), facts.get("summary"), None, None, None, *speeds
        for one in line["predictions"] if facts else ():
            name = one["figure"] if one["over"] is None else f"{one['figure']} over {one['over']}"
            bound = None if one["target"] is None else f"{'<=' if one['at_most'] else '>='} {one['target']:g}"
            measured = measured_value(one, facts, facts_of)
            yield line["name"], facts.get("requests"), name, bound, one["expected"], measured, *speeds


def measured_value(
    prediction: dict[str, Any], facts: dict[str, Any], facts_of: dict[str, dict[str, Any]]
) -> float | None:
    """The figure a prediction is about; None where it, or what it is divided by, was not measured."""
    value = _figure(facts, prediction["figure"])
    if value is None or prediction["over"] is None:
        return value
    base = _figure(facts_of.get(prediction["over"], {}), prediction["figure"])
    return None if not base else value / base


def _figure(facts: dict[str, Any], dotted: str) -> float | None:
    value: Any = facts
    for key in dotted.split("."):
        value = (value or {}).get(key)
    return value if value is None else float(value)


def table(header: tuple[str, ...], rows: Iterator[tuple[Any, ...]]) -> str:
    lines = [header, ("---",) * len(header), *(row + (None,) * (len(header) - len(row)) for row in rows)]
    return "\n".join(f"| {' | '.join(_cell(cell) for cell in line)} |" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else str(value).replace("\n", " ").replace("|", "/")
