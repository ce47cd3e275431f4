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
from tests.benchmarks.gpu.items import LLAMA, Prediction, ablations, beside_vllm, small, targets
from tests.benchmarks.gpu.processes import Done
from tests.benchmarks.gpu.session import Session
from tests.benchmarks.gpu.throughput import last_object, measure_items


def kernels(session: Session) -> None:
    """Of the tests that need a GPU those of bfloat16, which nothing else can run, and of the ways of the targets."""
    end = time.monotonic() + _TESTS_SHARE * session.left_s
    chosen = ["tests/ops/triton/test_silu_mul.py"] if session.is_smoke else [*_OF_TARGETS, "-k", _IN_BFLOAT16]
    _run_tests(session, "pytest -m gpu, bfloat16", [*_several(), *chosen], end)


def correct(session: Session) -> None:
    """The tests that need a GPU, as they are: several at a time, then those that fill or measure the card."""
    end = time.monotonic() + _TESTS_SHARE * session.left_s
    parts = {"pytest -m gpu": ("tests/ops/triton/test_silu_mul.py",)} if session.is_smoke else _ON_GPU
    others = [f"--deselect={name}" for name in _ALONE]
    for name, files in parts.items():
        _run_tests(session, name, [*_several(), *others, *files], end)
    if not session.is_smoke:
        _run_tests(session, "pytest -m gpu, alone", list(_ALONE), end)


def _several() -> list[str]:
    """At a time, where that can be; one that waits for the device forever ends its process, and another goes on."""
    if find_spec("xdist") is None:
        return []
    limit = ["--timeout=100", "--timeout-method=thread"] if find_spec("pytest_timeout") else []
    return ["-n", "14", *limit]


def _run_tests(session: Session, name: str, arguments: list[str], end: float) -> None:
    """A run that was stopped is told with the tests that had ended until then, and made again by the next call. A file
    that another version of something cannot import takes only itself along."""
    if not session.is_due("correct", name, least_s=20 + session.end - end):
        return
    asked = ["-m", "pytest", "-v", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *_EACH_FILE, *arguments]
    done = session.python(asked, end - time.monotonic(), _FOR_TESTS)
    lines = done.stdout.strip().splitlines()
    facts = {
        "summary": lines[-1] if lines else done.failure,
        "seconds": round(done.seconds, 1),
        "passed": done.status == 0,
        "num_passed": sum("PASSED" in line for line in lines),
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


def measure_small(session: Session) -> None:
    """The issue's target for a small model: the engine's first steps, and a minute in all."""
    measure_items(session, "small", small())


def measure_targets(session: Session) -> None:
    """The issue's other targets."""
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
_FAMILIES = ("tests/engine/test_on_gpu.py", "tests/engine/step/test_cuda_graphs_on_gpu.py")
_ON_GPU = {  # some 1,400 tests, of which a call has time for two thirds: what a part has told is not told again
    "pytest -m gpu, ops": ("tests/ops",),
    "pytest -m gpu, families": _FAMILIES,
    "pytest -m gpu, others": (
        "tests/models",
        "tests/engine",
        "tests/launch/bench",
        "tests/campaigns/test_determinism.py",
        *(f"--ignore={name}" for name in _FAMILIES),
    ),
}
_EACH_FILE = ("--continue-on-collection-errors",)
_OF_TARGETS = (
    "tests/ops/triton",
    "tests/ops/sampling/test_draw_tokens.py",
    "tests/ops/sampling/test_token_logprobs.py",
    "tests/engine/test_on_gpu.py",
    "tests/engine/test_fp8.py",
    "tests/engine/step/test_cuda_graphs_on_gpu.py",
)
_IN_BFLOAT16 = (  # or large, which is in bfloat16 too; and whole engines in float32, whose tokens are transformers'
    "not four_bit and not unpack and"
    " (bfloat16 or large or rms_norm or silu_mul or long_shared_prefix or (greedy and (llama or qwen3)))"
)
_FOR_TESTS = {
    "BULKRUN_CPU_OPS": "reference",  # what a GPU is compared with; compiling takes each of the processes 40 s
    "OMP_NUM_THREADS": "2",  # of each of the processes
    "PYTHONUNBUFFERED": "1",  # what had ended when it was stopped
}
_TESTS_SHARE = 0.6  # of the time: the rest is for the first numbers
_CHECKPOINT = ("-m", "tests.benchmarks.gpu.checkpoint")
_OPS_PREDICTED = {
    "qkv_proj": Prediction("share_of_ceiling", 0.80),
    "o_proj": Prediction("share_of_ceiling", 0.80),
    "gate_up_proj": Prediction("share_of_ceiling", 0.90),
    "down_proj": Prediction("share_of_ceiling", 0.90),
    "lm_head": Prediction("share_of_ceiling", 0.90),
    "states decode": Prediction("share_of_ceiling", 0.6),
    "streams": Prediction("share_of_ceiling", 0.8),
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
    "kernels": kernels,
    "small": measure_small,
    "targets": measure_targets,
    "correct": correct,
    "vllm": vllm,
    "ablations": measure_ablations,
    "ops": ops,
    "load": load,
}
