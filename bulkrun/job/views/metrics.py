"""A run's status as metrics in Prometheus' text format, for node_exporter's textfile collector and its like."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from bulkrun.job.views.status import RunStatus, State

_GAUGES = {  # by name: what it is, and what of a status it shows (None: not known now, and left out)
    "rows": ("Output rows, once they are planned.", "rows_total"),
    "rows_done": ("Output rows that are finished, with errors or without.", "rows_done"),
    "error_rows": ("Output rows that hold an error.", "error_rows"),
    "prompt_tokens": ("Prompt tokens of committed rows.", "prompt_tokens"),
    "completion_tokens": ("Generated tokens of committed rows.", "completion_tokens"),
    "rows_per_second": ("Output rows a second of all workers now.", "rows_per_s"),
    "tokens_per_second": ("Tokens a second of all workers now, prompts and outputs.", "tokens_per_s"),
    "remaining_seconds": ("Estimated time to the end.", "eta_s"),
    "last_commit_age_seconds": ("Time since the newest part was committed.", "last_commit_age_s"),
}


def metrics_text(status: RunStatus) -> str:
    """All metrics of a run, labelled with its directory and its job's name; its state is one of several that is 1."""
    return "\n".join(_lines(status)) + "\n"


def _lines(status: RunStatus) -> Iterator[str]:
    labels = f'run="{_escaped(str(status.root))}",job="{_escaped(status.name)}"'
    for name, (meaning, attribute) in _GAUGES.items():
        if (value := getattr(status, attribute)) is not None:
            yield from _head(name, meaning)
            yield f"bulkrun_{name}{{{labels}}} {value:.15g}"
    yield from _head("workers", "Processes that are at work on the run.")
    yield f"bulkrun_workers{{{labels}}} {sum(worker.alive for worker in status.workers)}"
    yield from _head("state", "1 for the state that the run is in.")
    for state in get_args(State):
        yield f'bulkrun_state{{{labels},state="{state}"}} {int(state == status.state)}'


def _head(name: str, meaning: str) -> Iterator[str]:
    yield f"# HELP bulkrun_{name} {meaning}"
    yield f"# TYPE bulkrun_{name} gauge"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
