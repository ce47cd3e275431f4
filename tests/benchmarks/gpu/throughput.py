"""Workloads, engine by engine, each engine in a process of its own; what fits into the time, and why the rest is not
there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from bulkrun.job.jobfile.engine import EngineSpec
from tests.benchmarks.gpu.items import Item, fitted, same_engine, smoke
from tests.benchmarks.gpu.results import UNENDED
from tests.benchmarks.gpu.session import Session

Run = Callable[[Session, str, list[Item]], str | None]  # in a process: why that failed; None where it ended well
_MOST_WITHOUT_ENGINE = 2  # processes


def measure_items(session: Session, stage: str, items: list[Item]) -> None:
    """In their order; what has been measured or cannot be is left out."""
    todo = list(_possible(session, stage, smoke(items) if session.is_smoke else items))
    for group in _by_engine(todo):
        _measure_group(session, stage, group)


def _possible(session: Session, stage: str, items: list[Item]) -> Iterator[Item]:
    for item in items:
        unknown = [key for key in item.settings if key not in EngineSpec.model_fields]
        if session.results.has(stage, item.name):
            continue
        if unknown:
            session.results.add_item(stage, item, skipped=f"no key engine.{unknown[0]} in this version")
        else:
            yield item


def _by_engine(items: list[Item]) -> list[list[Item]]:
    """Neighbours that can share an engine."""
    groups: list[list[Item]] = []
    for item in items:
        if groups and same_engine(groups[-1][-1], item):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _measure_group(session: Session, stage: str, todo: list[Item]) -> None:
    """Process after process: one that failed takes nothing with it but the item that failed. After two in a row whose
    engine did not come up there is no third."""
    run = _run_vllm if todo[0].engine == "vllm" else _run_ours
    num_without_engine = 0
    while todo and num_without_engine < _MOST_WITHOUT_ENGINE:
        chosen = fitted(todo, session.left_s, pace=session.results.pace(todo[0].shape))
        began, failure = _process(session, stage, chosen, run) if chosen else (set(), None)
        if not began and failure is None:
            break
        num_without_engine = 0 if began else num_without_engine + 1
        done = began or {chosen[0].name}
        todo = [item for item in todo if item.name not in done]
    for item in todo:
        left = f"{max(0.0, session.left_s):.0f} s were left, its run alone takes about {item.seconds:.0f}"
        why = left if num_without_engine < _MOST_WITHOUT_ENGINE else "the engine did not come up for those before"
        session.results.add_item(stage, item, skipped=f"unmeasured: {why}")


def _process(session: Session, stage: str, chosen: list[Item], run: Run) -> tuple[set[str], str | None]:
    """The names of the items that it began, and why it failed. What it was at when it was killed or hung, if only at
    loading the engine for it, is told with the reason."""
    size = session.results.size()
    failure = run(session, stage, chosen)
    lines = session.results.lines_since(size)
    was_at = chosen[0].name if not lines else lines[-1]["name"] if lines[-1].get("error") == UNENDED else None
    for item in chosen:
        if failure is not None and item.name == was_at:
            session.results.add_item(stage, item, error=failure)
    return {line["name"] for line in lines}, failure


def _run_ours(session: Session, stage: str, items: list[Item]) -> str | None:
    results = session.results
    task = {
        "stage": stage,
        "items": [asdict(item) for item in items],
        "limit_s": session.left_s,
        "hardware": results.hardware,
        "earlier": [str(path) for path in results.earlier],
        "results": str(results.path),
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        return session.python(["-m", "tests.benchmarks.gpu.workloads", file.name], session.left_s).failure


def _run_vllm(session: Session, stage: str, items: list[Item]) -> str | None:
    assert session.vllm is not None, "the stage is left out without it"
    (item,) = items
    lengths = ["--input-len", item.input_len, "--output-len", item.output_len]
    command = ["-m", "tests.benchmarks.gpu.peer", str(session.vllm / "bench_vllm.py"), "--shape", item.shape, *lengths]
    command += ["--num-requests", str(item.num_requests), "--shared-prefix", str(item.shared_prefix)]
    done = session.python(command, session.left_s, {"PYTHONPATH": str(session.vllm / "site")})
    if done.failure is not None:
        return done.failure
    facts = last_object(done.stdout)
    if facts is None:
        return f"no JSON among what it printed: {done.stdout[-600:]}"
    session.results.add_item(stage, item, facts={**facts, "settings": {"enable_prefix_caching": False}})
    return None


def last_object(text: str) -> dict[str, Any] | None:
    """Of the lines that are JSON objects the last one: libraries print after the result too."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    return None
