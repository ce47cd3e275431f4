"""What this machine offers a run, and what would go wrong on it. Imports torch; reads, and writes one small file.

The compiled CPU ops are compiled here where no run has done it yet.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from bulkrun.data.storage.new_name import take_name
from bulkrun.errors import described

PACKAGES = ("torch", "transformers", "triton", "pyarrow", "duckdb", "tokenizers", "safetensors")


class Check(NamedTuple):
    """One finding: `state` is ok, warn (works, but) or fail (a run would not work here)."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str


def examine(output: Path) -> list[Check]:
    """Every check, in the order a run would meet them; `output` is the directory results would go to."""
    return [
        _python(),
        *_packages(),
        _guarded("processor", _processor),
        _guarded("CPU ops", _compiled_ops),
        _guarded("memory", _memory),
        _guarded("gpu", _gpu),
        _guarded("disk", partial(_disk, output)),
        _guarded("hard links", partial(_hard_links, output)),
        _guarded("hub", _hub),
    ]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    """What a check finds; one that breaks (a package that cannot be imported) is what the doctor was called for."""
    try:
        return check()
    except Exception as error:
        return Check(name, "fail", described(error))


def _python() -> Check:
    return Check("python", "ok", f"{platform.python_version()} ({sys.executable})")


def _packages() -> list[Check]:
    found = []
    for name in PACKAGES:
        try:
            found.append(Check(name, "ok", version(name)))
        except PackageNotFoundError:
            needed = name != "triton" or sys.platform == "linux"
            found.append(Check(name, "fail" if needed else "warn", f"not installed: pip install {name}"))
    return found


def _processor() -> Check:
    import torch

    from bulkrun.models.loading.dtypes import cpu_multiplies_bfloat16

    units = "bf16 units: yes" if cpu_multiplies_bfloat16() else "bf16 units: no (models of bfloat16 run in float32)"
    return Check("processor", "ok", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {units}")


def _compiled_ops() -> Check:
    """Compiles them when this machine has not done so yet."""
    from bulkrun.ops.cpu.library import compiled_ops

    ops = compiled_ops()
    detail = ops.reason if ops.library is not None else f"no, CPU runs are slower: {ops.reason}"
    return Check("CPU ops", "warn" if ops.library is None else "ok", detail)


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Check("memory", "ok" if total >= 4 else "warn", f"{total:.1f} GiB")


def _gpu() -> Check:
    import torch

    from bulkrun.engine.device import refuse_gpu_without_kernels

    if not torch.cuda.is_available():
        return Check("gpu", "warn", "none that torch can use: jobs run on the CPU (small models only)")
    refuse_gpu_without_kernels()
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    free, total = torch.cuda.mem_get_info(0)
    return Check("gpu", "ok", f"{', '.join(names)}; {free / 2**30:.0f} of {total / 2**30:.0f} GiB free on the first")


def _disk(output: Path) -> Check:
    """Whether a synced write works where results would go, and how long one takes."""
    folder = _existing_parent(output)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"x" * 4096)
            start = time.perf_counter()
            os.fsync(file.fileno())
    except OSError as error:
        return Check("disk", "fail", f"cannot write to {folder}: {error.strerror}")
    took_ms = (time.perf_counter() - start) * 1e3
    stats = os.statvfs(folder)
    free = stats.f_bavail * stats.f_frsize / 2**30
    return Check("disk", "ok" if free > 1 else "warn", f"{free:.0f} GiB free in {folder}, fsync {took_ms:.1f} ms")


def _hard_links(output: Path) -> Check:
    """Parts are published by a step that lets exactly one of two workers win: link(2), else an exclusive rename."""
    folder = _existing_parent(output)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            source = Path(scratch) / "a"
            source.touch()
            take_name(source, Path(scratch) / "b")
            if not source.exists():
                return Check(
                    "hard links",
                    "warn",
                    f"{folder} has none: exclusive renames are used instead, but compact will not work",
                )
    except OSError as error:
        return Check("hard links", "fail", f"{folder} has none ({error.strerror}): put the output on a POSIX disk")
    return Check("hard links", "ok", "parts can be published exclusively")


def _hub() -> Check:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return Check("hub", "warn", f"HF_HUB_OFFLINE is set: only models in {constants.HF_HUB_CACHE} can be used")
    return Check("hub", "ok", f"models are kept in {constants.HF_HUB_CACHE}")


def _existing_parent(path: Path) -> Path:
    path = path.absolute()
    while not path.is_dir():
        path = path.parent
    return path
