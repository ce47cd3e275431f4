"""A few steps from the middle of a long run, under torch's profiler: what the device did, on which op, in which step.

The main run of a benchmark is not traced, so that tracing costs it nothing.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.launch.bench.device_trace import Busy, device_work
from bulkrun.launch.bench.op_costs import OpCall
from bulkrun.launch.bench.op_recorder import OpRecorder
from bulkrun.launch.bench.workload import Work
from bulkrun.request import Request, SamplingParams

NUM_STEPS = 32  # in each of the two windows
_FULL = 0.9  # of the KV cache: from here on a new sequence waits for another's end
_GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are


@dataclass(frozen=True, slots=True)
class Traced:
    """`plain`: the engine as it is. `by_op`: with its ops named, which `calls` describes.

    On a CPU they are one: there only named ops are known to work, whatever they call. `slowdown`: a step of `plain`
    over one that is not traced, in seconds.
    """

    plain: list[Busy]
    slowdown: float
    by_op: list[Busy]
    calls: list[OpCall]


def trace_steps(engine: LLMEngine, work: Sequence[Work], num_steps: int = NUM_STEPS) -> Traced:
    """Fill the idle engine with `work` and trace windows of `num_steps`; what is left is dropped."""
    recorder, filler = OpRecorder(engine), _Filler(engine, work)
    filler.fill()
    untraced_s = _seconds_per_step(engine, num_steps // 2)
    with recorder.steps() if engine.config.device.type == "cuda" else recorder.steps_and_ops():
        plain, traced_s = _window(engine, filler, num_steps)
    by_op = plain
    if engine.config.device.type == "cuda":
        with recorder.steps_and_ops():
            by_op, _ = _window(engine, filler, num_steps)
    filler.drop()
    return Traced(plain, traced_s / untraced_s, by_op, recorder.calls)


class _Filler:
    """Keeps the engine as full as it is in the middle of a long run."""

    def __init__(self, engine: LLMEngine, work: Sequence[Work]) -> None:
        self._engine, self._work = engine, work[: 2 * engine.max_num_seqs]
        self._ids: list[str] = []

    def fill(self) -> None:
        """Put requests in flight until seats or blocks run out, where the engine has nothing to do."""
        if self._engine.has_unfinished():
            return
        requests = [self._request(number) for number in range(len(self._work))]
        self._ids += [request.request_id for request in requests]
        for request in requests:
            self._engine.add_request(request)
        while self._has_room():
            self._engine.step()

    def drop(self) -> None:
        """Forget what has not ended."""
        self._engine.abort(self._ids)
        while self._engine.has_unfinished():
            self._engine.step()

    def _has_room(self) -> bool:
        stats = self._engine.stats()
        waits = stats.num_waiting > 0
        return waits and stats.num_running < self._engine.max_num_seqs and stats.kv_cache_usage < _FULL

    def _request(self, number: int) -> Request:
        """The first ones are at any place of their output, evenly spread; those that wait have not begun."""
        one = self._work[number]
        share = number * _GOLDEN % 1 if number < self._engine.max_num_seqs else 0.0
        done = tuple(one.prompt_token_ids[:1] * int(share * one.num_output_tokens))
        params = SamplingParams(max_tokens=one.num_output_tokens, temperature=0.0, ignore_eos=True)
        name = f"traced-{len(self._ids) + number}"
        return Request(name, one.prompt_token_ids, params, seed=number, output_token_ids=done)


def _window(engine: LLMEngine, filler: _Filler, num_steps: int) -> tuple[list[Busy], float]:
    """What the device did, and the seconds of a step."""
    filler.fill()
    on_gpu = engine.config.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiler:
        step_s = _seconds_per_step(engine, num_steps)
    with tempfile.TemporaryDirectory(prefix="bulkrun-trace-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return device_work(json.loads(path.read_text())["traceEvents"]), step_s


def _seconds_per_step(engine: LLMEngine, num_steps: int) -> float:
    start, num_done = time.perf_counter(), 0
    while num_done < num_steps and engine.has_unfinished():
        engine.step()
        num_done += 1
    if engine.config.device.type == "cuda":
        torch.cuda.synchronize(engine.config.device)
    return (time.perf_counter() - start) / max(1, num_done)
