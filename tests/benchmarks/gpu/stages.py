"""The stages: each measures what it is named for, within the seconds it is given, and adds to the results."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from bulkrun.job.jobfile.engine import EngineSpec
from tests.benchmarks.gpu import checkpoint
from tests.benchmarks.gpu.items import (
    LLAMA,
    Item,
    Prediction,
    ablations,
    beside_vllm,
    fitted,
    same_engine,
    smoke,
    targets_1,
    targets_2,
)
from tests.benchmarks.gpu.processes import Done, python
from tests.benchmarks.gpu.results import Results


@dataclass(frozen=True, slots=True)
class Session:
    """One call of the script: where results go, how long a stage may take, and what was brought along."""

    results: Results
    stage_s: float
    is_smoke: bool
    vllm: Path | None  # a folder with bench_vllm.py and, under site/, the installed wheels

    def deadline(self) -> float:
        """When a stage that starts now must have ended."""
        return time.monotonic() + self.stage_s


def correct(session: Session) -> None:
    """The tests that need a GPU, as they are: several at a time, then those that fill or measure the card."""
    deadline = session.deadline()
    several = ["-n", "8", "--dist", "worksteal"] if find_spec("xdist") else []
    files = ("tests/ops/triton/test_silu_mul.py",) if session.is_smoke else _ON_GPU
    others = [f"--deselect={name}" for name in _ALONE]
    _run_tests(session, "pytest -m gpu", [*several, *others, *files], deadline)
    if not session.is_smoke:
        _run_tests(session, "pytest -m gpu, alone", list(_ALONE), deadline)


def _run_tests(session: Session, name: str, arguments: list[str], deadline: float) -> None:
    """A run that was stopped is told with the tests that failed until then, and made again by the next call."""
    if session.results.has("correct", name):
        return
    asked = ["-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", *arguments]
    done = python(asked, deadline - time.monotonic())
    lines = done.stdout.strip().splitlines()
    facts = {
        "summary": lines[-1] if lines else done.failure,
        "seconds": round(done.seconds, 1),
        "passed": done.status == 0,
        "failed": [line for line in lines if "FAILED" in line or "ERROR" in line][:40],
    }
    outcome = {"facts": facts} if done.status is not None else {"error": done.failure, "until_then": facts}
    session.results.add("correct", name, **outcome)


def ops(session: Session) -> None:
    """Every Triton op alone, beside its reference."""
    if session.results.has("ops", "gpu_ops"):
        return
    done = python(["-m", "tests.benchmarks.gpu_ops"], session.stage_s)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]  # one may be cut off
    for op in lines[1:]:
        predictions = [one for prefix, one in _OPS_PREDICTED.items() if op["op"].startswith(prefix)]
        session.results.add("ops", op["op"], predictions[:1], facts=op)
    outcome = {"facts": lines[0]} if done.failure is None else {"error": done.failure}
    session.results.add("ops", "gpu_ops", **outcome)


def first_targets(session: Session) -> None:
    """Targets of the issue, as many as fill a call."""
    _measure(session, "targets-1", targets_1())


def other_targets(session: Session) -> None:
    """The rest of them."""
    _measure(session, "targets-2", targets_2())


def measure_ablations(session: Session) -> None:
    """The engine without one of its parts."""
    _measure(session, "ablations", ablations())


def vllm(session: Session) -> None:
    """vLLM in the same call as bulkrun, in turn."""
    if session.vllm is None:
        session.results.add("vllm", "vllm", skipped="no --vllm: its wheels were not carried")
        return
    _measure(session, "vllm", beside_vllm())


def load(session: Session) -> None:
    """A checkpoint of 16 GB from disk and from the page cache, and how soon the first token comes."""
    if session.results.has("load", "from disk"):
        return
    shape, device = ("llama-20m", "cpu") if session.is_smoke else (LLAMA, "cuda")
    deadline = session.deadline()
    with tempfile.TemporaryDirectory(prefix="bulkrun-load-") as scratch:
        folder = Path(scratch)
        written = python([*_CHECKPOINT, "write", scratch, shape], session.stage_s)
        if written.failure is not None:
            session.results.add("load", "from disk", error=written.failure)
            return
        checkpoint.drop_from_page_cache(folder)
        read_s, num_bytes = checkpoint.read_all(folder)
        disk = {"gb": round(num_bytes / 1e9, 2), "disk_gb_s": round(num_bytes / read_s / 1e9, 3)}
        for name in ("from disk", "from the page cache"):
            if name == "from disk":
                checkpoint.drop_from_page_cache(folder)
            done = python([*_CHECKPOINT, "first-token", scratch, device], deadline - time.monotonic())
            _add_load(session, name, done, disk)


def _add_load(session: Session, name: str, done: Done, disk: dict[str, float]) -> None:
    predictions = [Prediction("over_disk", 1.1, 1.25, at_most=True)] if name == "from disk" else []
    predictions.append(Prediction("first_token_s", 25, 60, at_most=True))
    if done.failure is not None:
        session.results.add("load", name, predictions, error=done.failure)
        return
    facts = json.loads(done.stdout.splitlines()[-1])
    over_disk = round(facts["load_s"] * disk["disk_gb_s"] / disk["gb"], 2)
    session.results.add("load", name, predictions, facts={**disk, **facts, "over_disk": over_disk})


def _measure(session: Session, stage: str, items: list[Item]) -> None:
    """One process per engine; what has been measured or cannot be is left out."""
    deadline = session.deadline()
    todo = list(_possible(session, stage, smoke(items) if session.is_smoke else items))
    groups = [list(group) for _, group in groupby(fitted(todo, session.stage_s), key=_engine_key(todo))]
    for group in groups:
        reason: str | None
        left_s = deadline - time.monotonic()
        if left_s < 1:
            reason = "no time left in this stage"
        elif group[0].engine == "vllm":
            reason = _run_vllm(session, stage, group[0], left_s)
        else:
            reason = _run_ours(session, stage, group, left_s)
        for item in group:
            if reason is not None and not session.results.has(stage, item.name):
                session.results.add_item(stage, item, error=reason)


def _engine_key(items: list[Item]) -> Callable[[Item], int]:
    """Neighbours that can share an engine have the same number."""
    numbers, number = {}, 0
    for i, item in enumerate(items):
        number += i > 0 and not same_engine(item, items[i - 1])
        numbers[item.name] = number
    return lambda item: numbers[item.name]


def _possible(session: Session, stage: str, items: list[Item]) -> Iterator[Item]:
    for item in items:
        unknown = [key for key in item.settings if key not in EngineSpec.model_fields]
        if session.results.has(stage, item.name):
            continue
        if unknown:
            session.results.add_item(stage, item, skipped=f"no key engine.{unknown[0]} in this version")
        else:
            yield item


def _run_ours(session: Session, stage: str, group: list[Item], limit_s: float) -> str | None:
    """Why some item has no result; None where all have."""
    task = {"stage": stage, "items": [asdict(item) for item in group], "results": str(session.results.path)}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(task, file)
        file.flush()
        return python(["-m", "tests.benchmarks.gpu.workloads", file.name], limit_s).failure


def _run_vllm(session: Session, stage: str, item: Item, limit_s: float) -> str | None:
    assert session.vllm is not None, "the stage is left out without it"
    lengths = ["--input-len", item.input_len, "--output-len", item.output_len]
    command = [str(session.vllm / "bench_vllm.py"), "--shape", item.shape, *lengths]
    command += ["--num-requests", str(item.num_requests), "--shared-prefix", str(item.shared_prefix)]
    done = python(command, limit_s, {"PYTHONPATH": str(session.vllm / "site")})
    if done.failure is None:
        session.results.add_item(stage, item, facts=json.loads(done.stdout.splitlines()[-1]))
    return done.failure


_ALONE = (
    "tests/engine/test_out_of_memory.py",
    "tests/engine/test_memory_probe.py",
    "tests/ops/triton/test_paged_attention.py::test_addresses_beyond_32_bits",
)
_ON_GPU = ("tests/ops", "tests/models", "tests/engine", "tests/launch/bench")
_CHECKPOINT = ("-m", "tests.benchmarks.gpu.checkpoint")
_OPS_PREDICTED = {
    "qkv_proj": Prediction("share_of_ceiling", 0.80),
    "o_proj": Prediction("share_of_ceiling", 0.80),
    "gate_up_proj": Prediction("share_of_ceiling", 0.90),
    "down_proj": Prediction("share_of_ceiling", 0.90),
    "lm_head": Prediction("share_of_ceiling", 0.90),
    "decode shared_prefix": Prediction("rival_over_ours", 8.0, 2.0),
    "decode": Prediction("share_of_ceiling", 0.85, 0.85),
    "prefill": Prediction("tflop_s", 400, 400),
    "draw_tokens filtered": Prediction("rival_over_ours", 20),
    "draw_tokens": Prediction("rival_over_ours", 20),
    "token_logprobs": Prediction("rival_over_ours", 5),
    "rms_norm": Prediction("share_of_ceiling", 0.85),
    "add_rms_norm": Prediction("share_of_ceiling", 0.85),
    "silu_mul": Prediction("share_of_ceiling", 0.85),
}
STAGES: dict[str, Callable[[Session], None]] = {
    "correct": correct,
    "ops": ops,
    "load": load,
    "targets-1": first_targets,
    "targets-2": other_targets,
    "ablations": measure_ablations,
    "vllm": vllm,
}
