"""A worker's collector leaves alone what is there to stay, and still finds what goes later."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.models.tiny_models import save_tiny_model

_SCRIPT = """
import gc, weakref
from bulkrun.launch.processes.garbage import freeze_heap, release_garbage, spare_heap

class Node:
    def __init__(self):
        self.me = self

full = []
gc.callbacks.append(lambda phase, info: full.append(phase) if phase == "start" and info["generation"] == 2 else None)

def collections():
    return sum(generation["collections"] for generation in gc.get_stats())

assert collections() and gc.isenabled()
spare_heap()
before = collections()
loaded = [[] for _ in range(100_000)]
assert collections() == before, "what is being loaded was looked at"

kept = [Node() for _ in range(1000)]
engine = Node()  # the first engine, set aside with everything else
gone = weakref.ref(engine)
freeze_heap()
assert gc.get_freeze_count() > 1000 and gc.isenabled()
del full[:]

del engine
release_garbage()
assert gone() is None, "an engine that failed is still in memory"
freeze_heap()  # there is another engine now
assert gc.get_freeze_count() > 1000
del full[:]

alive = []
for row in range(100_000):  # requests in flight: containers that come and go, no cycles
    alive.append([row, (row, [row])])
    if len(alive) > 5_000:
        del alive[:2_500]
assert not full, f"{len(full)} full collections in the middle of a run"

late = Node()
gone = weakref.ref(late)
del late
gc.collect()
assert gone() is None
"""


def test_no_full_collection_in_a_run_and_a_failed_engine_goes() -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT], check=True, timeout=60)


def test_what_is_set_aside_is_no_leak_when_the_process_ends() -> None:
    """transformers and torch import Triton where it is installed; what it writes would end each worker's log."""
    pytest.importorskip("triton")
    script = "import triton; from bulkrun.launch.processes.garbage import *; freeze_heap(); end_quietly()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    assert (done.stdout, done.stderr) == ("", "")


_BROKEN_ENGINE = """
import sys, weakref
from pathlib import Path
from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work.deadline import Deadline
from bulkrun.job.work.engine_runner import EngineRunner
from bulkrun.job.work.flight import FlightLog
from bulkrun.job.work.shard_work import Generation
from bulkrun.launch.processes.garbage import release_garbage, freeze_heap
from bulkrun.request import Request, SamplingParams

memory = []

def load():
    engine = LLMEngine.from_model_dir(sys.argv[1], device="cpu", dtype="float32", kv_cache_memory_bytes=2**24)
    memory.extend([weakref.ref(engine.model_runner.kv_cache.k[0]), weakref.ref(engine.model_runner.model)])
    freeze_heap()
    return engine

def breaks_on_its_last_step(*args, **options):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

def load_again(adapter):
    release_garbage()
    assert not any(one() for one in memory), "the engine that broke still has its memory"
    return load()

room = EngineRunner(load(), load_again, FlightLog(RunDir(Path(sys.argv[2])), "w"), Deadline(None), lambda *broke: None)
requests = [Request(str(row), (5, 6, 7), SamplingParams(max_tokens=4)) for row in range(3)]
room.admit([Generation(request, 0, (row,), 0) for row, request in enumerate(requests)])
room.step()
room._engine.model_runner._logits = breaks_on_its_last_step
assert room.step() == [] and room.isolation.active
"""


def test_a_broken_engine_gives_its_memory_back_before_the_next_is_loaded(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    (tmp_path / "out").mkdir()
    command = [sys.executable, "-c", _BROKEN_ENGINE, str(model), str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=120)
