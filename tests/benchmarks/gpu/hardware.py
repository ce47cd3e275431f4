"""What results were measured on: the device and its driver, versions, commit. Knows no benchmark, imports no torch."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

_ASKED = {"device": "name", "driver": "driver_version", "compute_capability": "compute_cap", "memory": "memory.total"}


def hardware(commit: str) -> dict[str, Any]:
    """`device` is "no GPU" where nvidia-smi finds none."""
    return {**_device(), "torch": _version("torch"), "triton": _version("triton"), "commit": commit}


def _device() -> dict[str, str]:
    command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return {"device": "no GPU"}
    return dict(zip(_ASKED, done.stdout.splitlines()[0].split(", "), strict=True))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
