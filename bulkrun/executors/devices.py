"""Which part of this machine a worker gets: one GPU, or its share of the cores. Loads no torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from bulkrun.errors import UsageError

_PATIENCE_S = 30.0
# NVIDIA's (containers may have one of the two), Windows', AMD's
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that CUDA would show to a process started now, as CUDA_VISIBLE_DEVICES names them.

    What it names on a machine without a driver is nothing.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(_installed_gpus())]
    entries = [entry.strip() for entry in named.split(",")]
    if any(entries) and not _has_driver():
        return []
    return entries[: entries.index("-1")] if "-1" in entries else [entry for entry in entries if entry]


def _has_driver() -> bool:
    """Whether there is a driver. Containers may have one without nvidia-smi, so nvidia-smi is asked second."""
    return any(Path(path).exists() for path in _DRIVERS) or _installed_gpus() > 0


def _installed_gpus() -> int:
    """How many GPUs the driver knows; 0 without a driver."""
    try:
        shown = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in shown.splitlines())


def worker_environments(workers: int, device: str, environ: Mapping[str, str] = os.environ) -> list[dict[str, str]]:
    """What each of `workers` processes has in its environment beyond this one's.

    `device` is the job's `engine.device`. Raises UsageError when there are GPUs, but fewer than workers.
    """
    gpus = visible_gpus(environ) if device != "cpu" else []
    if gpus and workers > len(gpus):
        raise UsageError(
            f"run.workers is {workers}, but there are {len(gpus)} GPUs ({', '.join(gpus)}); "
            f"use --workers {len(gpus)}, or engine.device: cpu"
        )
    environments: list[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in gpus[:workers]]
    environments += [{} for _ in range(workers - len(environments))]
    if workers > 1 and "OMP_NUM_THREADS" not in environ:
        threads = str(max(1, len(os.sched_getaffinity(0)) // workers))
        for environment in environments:
            environment["OMP_NUM_THREADS"] = threads
    return environments
