"""What tells a process from every other one: where its pid means something, and when it was started."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_place() -> str:
    """The machine, boot and pid namespace in which a pid of this process means something."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return "|".join((socket.gethostname(), boot_id(), namespace))


def boot_id() -> str:
    """What tells a boot of a machine from every other one, "" where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """When a process started, "" where the system does not tell, None when it is gone (or a zombie)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if Path("/proc/self/stat").exists() or not _answers(pid) else ""
    except OSError:
        return ""
    return None if fields[0] in "ZX" else fields[19]


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
