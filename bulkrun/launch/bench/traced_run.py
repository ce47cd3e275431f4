"""A few steps from the middle of a long run, under torch's profiler: what the device did, on which op, in which step.

The main run of a benchmark is not traced, so that tracing costs it nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.device_trace import Busy, device_work
from bulkrun.launch.bench.op_costs import OpCall
from bulkrun.launch.bench.op_recorder import OpRecorder
from bulkrun.launch.bench.workload import Work
from bulkrun.request import Request, SamplingParams
from bulkrun.scratch import Scratch

NUM_STEPS = 32  # in each of the two windows
_FULL = 0.9  # of the KV cache: from here on a new sequence waits for another's end
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are


@dataclass(frozen=True, slots=True)
class Traced:
    """`plain`: the engine as it is. `by_op`: with its ops named, which `calls` describes.

    On a CPU they are one: there only named ops are known to work, whatever they call. `plain` is None where naming them
    takes the layers out of the one call in which they run otherwise. `slowdown`: a step of `plain` over one that is not
    traced, in seconds.
    """

    plain: list[Busy] | None
    slowdown: float
    by_op: list[Busy]
    calls: list[OpCall]


def trace_steps(engine: LLMEngine, work: Iterator[Work], width: int, num_steps: int = NUM_STEPS) -> Traced:
    """Put `width` requests into the idle engine and trace windows of `num_steps`; what is left is dropped.

    Whenever one ends, the next of `work`, which has no end, takes its place.
    """
    recorder, run = OpRecorder(engine), _SteadyRun(engine, work, width)
    run.begin()
    untraced_s = run.step(num_steps // 2)
    with recorder.steps() if engine.config.device.type == "cuda" else recorder.steps_and_ops():
        by_op, traced_s = _window(engine, run, num_steps)
    plain: list[Busy] | None = by_op
    if engine.config.device.type == "cuda":
        with recorder.steps_and_ops():
            by_op, _ = _window(engine, run, num_steps)
    run.drop()
    if recorder.splits_layers and engine.config.device.type == "cpu":
        plain = None
    return Traced(plain, traced_s / untraced_s, by_op, recorder.calls)


class _SteadyRun:
    """Keeps the engine as full as it is in the middle of a long run."""

    def __init__(self, engine: LLMEngine, work: Iterator[Work], width: int) -> None:
        self._engine, self._work, self._width = engine, work, width
        self._num_added = 0

    def begin(self) -> None:
        """Put requests in flight until all have a seat, or seats or blocks run out; then replace those that ended."""
        for number in range(self._width):
            self._add(number * _GOLDEN % 1)
        num_ended = 0
        while self._has_room():
            num_ended += len(self._engine.step())
        for _ in range(num_ended):
            self._add(0.0)

    def step(self, num_steps: int) -> float:
        """Mean seconds of a step over `num_steps`, the device's work included."""
        start = time.perf_counter()
        for _ in range(num_steps):
            for _ in self._engine.step():
                self._add(0.0)
        if self._engine.config.device.type == "cuda":
            torch.cuda.synchronize(self._engine.config.device)
        return (time.perf_counter() - start) / num_steps

    def drop(self) -> None:
        """Drop the requests that have not ended."""
        self._engine.abort([_name(number) for number in range(self._num_added)])
        while self._engine.has_unfinished():
            self._engine.step()

    def _has_room(self) -> bool:
        stats = self._engine.stats()
        has_seat = stats.num_waiting > 0 and stats.num_running < self._engine.max_num_seqs
        return has_seat and stats.kv_cache_usage < _FULL

    def _add(self, share: float) -> None:
        """The next request, with this share of its output behind it."""
        one = next(self._work)
        done = tuple(one.prompt_token_ids[:1] * int(share * one.num_output_tokens))
        params = SamplingParams(max_tokens=one.num_output_tokens, temperature=0.0, ignore_eos=True)
        name, seed = _name(self._num_added), self._num_added
        self._engine.add_request(Request(name, one.prompt_token_ids, params, seed=seed, output_token_ids=done))
        self._num_added += 1


def _name(number: int) -> str:
    return f"traced-{number}"


def _window(engine: LLMEngine, run: _SteadyRun, num_steps: int) -> tuple[list[Busy], float]:
    """What the device did, and the seconds of a step."""
    on_gpu = engine.config.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step_s = run.step(num_steps)
    with Scratch() as folder:
        path = folder / "trace.json"
        profiler.export_chrome_trace(str(path))
        return device_work(json.loads(path.read_text())["traceEvents"]), step_s
