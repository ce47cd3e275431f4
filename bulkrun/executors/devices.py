"""Which part of this machine a worker gets: one GPU, or its share of the cores. Loads no torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from bulkrun.errors import UsageError

_PATIENCE_S = 30.0
# NVIDIA's (containers may have one of the two), Windows', AMD's
_DRIVERS = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def visible_gpus(environ: Mapping[str, str] = os.environ) -> list[str]:
    """The GPUs that CUDA would show to a process started now, as CUDA_VISIBLE_DEVICES names them.

    What it names on a machine without a driver is nothing, nor is what stands behind an entry that names no GPU: -1, or
    the NoDevFiles that Slurm writes for a job without any.
    """
    named = environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return [str(index) for index in range(_installed_gpus())]
    gpus = list(takewhile(_names_gpu, (entry.strip() for entry in named.split(","))))
    return gpus if gpus and _has_driver() else []


def _names_gpu(entry: str) -> bool:
    return re.match(r"\+?\d|GPU-|MIG-", entry) is not None


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
