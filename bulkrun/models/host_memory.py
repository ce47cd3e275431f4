"""Memory of the host: how much may be taken, and pages that are not there until somebody writes them.

What may be taken is what the system has free, less where a control group (container, Slurm) allows less.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import torch


def available_ram_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping and without hitting a memory limit of this process (cgroup v2)."""
    available = _field(proc / "meminfo", "MemAvailable:") * 1024
    headrooms = [_headroom(folder) for folder in _cgroups(proc / "self/cgroup", cgroup_root)]
    return max(0, min([available, *(headroom for headroom in headrooms if headroom is not None)]))


def untouched_zeros(shape: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> torch.Tensor:
    """`torch.zeros` without writing them: pages that nobody has touched read as zero and take no memory.

    `huge_pages`: found and cleared 2 MiB at a time where the kernel can. Raises OSError where there is no room.
    """
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if huge_pages and hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def _cgroups(membership: Path, root: Path) -> Iterator[Path]:
    """The process's control group and all groups around it; a limit may be set on any of them."""
    lines = membership.read_text(encoding="ascii").splitlines() if membership.exists() else []
    for line in lines:
        if line.startswith("0::"):
            path = Path(line.removeprefix("0::").lstrip("/"))
            yield from (root / part for part in (path, *path.parents))


def _headroom(folder: Path) -> int | None:
    """What is left of the group's limit, file cache that can be dropped not counted; None without a limit."""
    limit = folder / "memory.max"
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    if text == "max":
        return None
    used = int((folder / "memory.current").read_text(encoding="ascii"))
    return int(text) - used + _field(folder / "memory.stat", "inactive_file")


def _field(file: Path, name: str) -> int:
    """The number after `name` in a file of `name value` lines."""
    lines = file.read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.split()[:1] == [name])
