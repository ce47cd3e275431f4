"""What a number was measured on, and where numbers are kept. Knows no benchmark; imports the standard library only."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

HISTORY = Path(__file__).with_name("history.jsonl")


def machine() -> dict[str, object]:
    """Processor, cores, load and versions; no names of machines."""
    cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    name = next((line.split(":")[1].strip() for line in cpuinfo.splitlines() if "model name" in line), "unknown")
    return {
        "cpu": name,
        "cores": os.cpu_count(),
        "amx_bf16": "amx_bf16" in cpuinfo,
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def commit() -> str:
    """The commit that was measured, marked where the tree has changes."""
    command = ["git", "-C", str(HISTORY.parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def record(result: Mapping[str, object]) -> None:
    """Append one line to history.jsonl."""
    with HISTORY.open("a", encoding="utf-8") as history:
        history.write(json.dumps(result) + "\n")
