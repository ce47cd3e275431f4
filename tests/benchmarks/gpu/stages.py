"""The stages: each measures what it is named for, within the seconds it is given, and adds to the results."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from tests.benchmarks.gpu import checkpoint, fake_peer
from tests.benchmarks.gpu.items import LLAMA, Prediction, ablations, beside_vllm, targets
from tests.benchmarks.gpu.processes import Done
from tests.benchmarks.gpu.session import Session
from tests.benchmarks.gpu.throughput import last_object, measure_items


def correct(session: Session) -> None:
    """The tests that need a GPU, as they are: several at a time, then those that fill or measure the card."""
    end = time.monotonic() + _CORRECT_SHARE * session.left_s
    several = ["-n", "8", "--dist", "worksteal"] if find_spec("xdist") else []
    files = ("tests/ops/triton/test_silu_mul.py",) if session.is_smoke else _ON_GPU
    others = [f"--deselect={name}" for name in _ALONE]
    _run_tests(session, "pytest -m gpu", [*several, *others, *files], end)
    if not session.is_smoke:
        _run_tests(session, "pytest -m gpu, alone", list(_ALONE), end)


def _run_tests(session: Session, name: str, arguments: list[str], end: float) -> None:
    """A run that was stopped is told with the tests that failed until then, and made again by the next call."""
    if not session.is_due("correct", name, least_s=20):
        return
    asked = ["-m", "pytest", "-v", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *arguments]
    done = session.python(asked, end - time.monotonic())
    lines = done.stdout.strip().splitlines()
    facts = {
        "summary": lines[-1] if lines else done.failure,
        "seconds": round(done.seconds, 1),
        "passed": done.status == 0,
        "failed": [line for line in lines if "FAILED" in line or "ERROR" in line][:40],
        "skipped": [line for line in lines if line.startswith("SKIPPED")][:40],
    }
    outcome = {"facts": facts} if done.status is not None else {"error": done.failure, "until_then": facts}
    session.results.add("correct", name, **outcome)


def ops(session: Session) -> None:
    """Every Triton op alone, beside its reference."""
    if not session.is_due("ops", "gpu_ops", least_s=40):
        return
    sizes = ["--smoke"] if session.is_smoke else []
    done = session.python(["-m", "tests.benchmarks.gpu_ops", *sizes], session.left_s)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.endswith("}")]  # one may be cut off
    for op in lines[1:]:
        predictions = [one for prefix, one in _OPS_PREDICTED.items() if op["op"].startswith(prefix)]
        session.results.add("ops", op["op"], predictions[:1], facts=op)
    outcome = {"facts": lines[0]} if done.failure is None else {"error": done.failure}
    session.results.add("ops", "gpu_ops", **outcome)


def measure_targets(session: Session) -> None:
    """The issue's targets."""
    measure_items(session, "targets", targets())


def measure_ablations(session: Session) -> None:
    """The engine without one of its parts."""
    measure_items(session, "ablations", ablations())


def vllm(session: Session) -> None:
    """vLLM in the same call as bulkrun, in turn; in a smoke run a script that answers at once."""
    if session.vllm is not None:
        measure_items(session, "vllm", beside_vllm())
    elif not session.is_smoke:
        session.results.add("vllm", "vllm", skipped="no --vllm: its wheels were not carried")
    else:
        with tempfile.TemporaryDirectory() as folder:
            fake_peer.write(Path(folder))
            measure_items(replace(session, vllm=Path(folder)), "vllm", beside_vllm())


def load(session: Session) -> None:
    """A checkpoint of 16 GB from disk and from the page cache, and how soon the first token comes."""
    if not session.is_due("load", "from disk", least_s=0 if session.is_smoke else 90):
        return
    shape, device = ("llama-20m", "cpu") if session.is_smoke else (LLAMA, "cuda")
    with tempfile.TemporaryDirectory(prefix="bulkrun-load-") as scratch:
        folder = Path(scratch)
        written = session.python([*_CHECKPOINT, "write", scratch, shape], session.left_s)
        if written.failure is not None:
            session.results.add("load", "from disk", error=written.failure)
            return
        checkpoint.drop_from_page_cache(folder)
        read_s, num_bytes = checkpoint.read_all(folder)
        disk = {"gb": round(num_bytes / 1e9, 2), "disk_gb_s": round(num_bytes / read_s / 1e9, 3)}
        for name in ("from disk", "from the page cache"):
            if name == "from disk":
                checkpoint.drop_from_page_cache(folder)
            done = session.python([*_CHECKPOINT, "first-token", scratch, device], session.left_s)
            _add_load(session, name, done, disk)


def _add_load(session: Session, name: str, done: Done, disk: dict[str, float]) -> None:
    predictions = [Prediction("over_disk", 1.1, 1.25, at_most=True)] if name == "from disk" else []
    predictions.append(Prediction("first_token_s", 25, 60, at_most=True))
    facts = last_object(done.stdout)
    if done.failure is not None or facts is None:
        session.results.add("load", name, predictions, error=done.failure or "it printed no result")
        return
    over_disk = round(facts["load_s"] * disk["disk_gb_s"] / disk["gb"], 2)
    session.results.add("load", name, predictions, facts={**disk, **facts, "over_disk": over_disk})


_ALONE = (
    "tests/engine/test_out_of_memory.py",
    "tests/engine/test_memory_probe.py",
    "tests/ops/triton/test_paged_attention.py::test_addresses_beyond_32_bits",
)
_ON_GPU = ("tests/ops", "tests/models", "tests/engine", "tests/launch/bench")
_CORRECT_SHARE = 0.45  # of the time: the rest is for the first targets
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
    "targets": measure_targets,
    "vllm": vllm,
    "ablations": measure_ablations,
    "ops": ops,
    "load": load,
}
