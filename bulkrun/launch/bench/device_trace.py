"""From a torch profiler's trace to when the device worked, on which op and in which step. Torch-free.

A trace is the `traceEvents` of the Chrome format that `torch.profiler` exports: times in microseconds;
`user_annotation` for `record_function`, `cpu_op` for torch's ops on the host, `kernel`, `gpu_memcpy` and `gpu_memset`
for a GPU's work, whose launch on the host has the same `correlation`. The device's work is the GPU's where the trace
has any, else the host's: then an op, annotated by us or torch's own, works from its call to its return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

STEP_PREFIX, OP_PREFIX = "bulkrun-step#", "bulkrun-op#"  # annotations: a number follows
_GPU_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_SECOND = 1e6

Event = Mapping[str, Any]


class Busy(NamedTuple):
    """A stretch of the device's time: seconds on the trace's clock, the op's call and the step it belongs to, and what
    the trace calls it."""

    start_s: float
    end_s: float
    call: int | None
    step: int | None
    name: str = ""


def device_work(events: Iterable[Event]) -> list[Busy]:
    """What the device did, by start."""
    timed = sorted((event for event in events if event.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    gpu = [event for event in timed if event.get("cat") in _GPU_WORK]
    return sorted(_gpu_work(timed, gpu) if gpu else _host_work(timed), key=lambda busy: busy.start_s)


def _gpu_work(timed: list[Event], gpu: list[Event]) -> Iterator[Busy]:
    """Each kernel goes to what its launch was inside of."""
    owners = {
        event["args"]["correlation"]: owner
        for event, owner in _inside_of(timed)
        if event.get("cat") in _LAUNCHES and "correlation" in event["args"]
    }
    for event in gpu:
        owner = owners.get(event["args"].get("correlation"), _Owner())
        yield _busy(event, owner.call, owner.step)


def _host_work(timed: list[Event]) -> Iterator[Busy]:
    """The outermost ops: what they call in turn is part of them."""
    busy_until = 0.0
    for event, owner in _inside_of(timed):
        call = _number(event, OP_PREFIX)
        if (call is None and event.get("cat") != "cpu_op") or event["ts"] < busy_until:
            continue
        busy_until = event["ts"] + event["dur"]
        yield _busy(event, call, owner.step)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The innermost annotations around an event."""

    call: int | None = None
    step: int | None = None


def _inside_of(timed: list[Event]) -> Iterator[tuple[Event, _Owner]]:
    """Every event of a host thread with the annotations it happened in, thread by thread as time goes on."""
    open_by_thread: dict[object, list[tuple[float, _Owner]]] = {}
    for event in timed:
        around = open_by_thread.setdefault(event.get("tid"), [])
        while around and around[-1][0] <= event["ts"]:
            around.pop()
        owner = around[-1][1] if around else _Owner()
        yield event, owner
        call, step = _number(event, OP_PREFIX), _number(event, STEP_PREFIX)
        if call is not None:
            around.append((event["ts"] + event["dur"], _Owner(call, owner.step)))
        elif step is not None:
            around.append((event["ts"] + event["dur"], _Owner(owner.call, step)))


def _busy(event: Event, call: int | None, step: int | None) -> Busy:
    return Busy(event["ts"] / _SECOND, (event["ts"] + event["dur"]) / _SECOND, call, step, event["name"])


def _number(event: Event, prefix: str) -> int | None:
    """The number of one of our host annotations. (A GPU's timeline repeats them as `gpu_user_annotation`.)"""
    if event.get("cat") != "user_annotation" or not event["name"].startswith(prefix):
        return None
    return int(event["name"].removeprefix(prefix))
