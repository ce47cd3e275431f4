"""Memory of the host: how much may be taken, and pages that are not there until somebody writes them.

What may be taken is what the system has free, less where a control group (container, Slurm) allows less.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch


class _CgroupFiles(NamedTuple):
    """What one version of control groups calls a group's limit, its use, and the caches in it that can be dropped."""

    limit: str
    used: str
    droppable: tuple[str, ...]  # of memory.stat


_V1 = _CgroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_V2 = _CgroupFiles("memory.max", "memory.current", ("active_file", "inactive_file", "slab_reclaimable"))


def available_ram_bytes(proc: Path = Path("/proc"), cgroup_root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that can be taken without swapping and without hitting a memory limit of this process.

    All RAM there is, where the system does not say what is free.
    """
    meminfo = _fields(proc / "meminfo") if (proc / "meminfo").exists() else {}
    available = meminfo.get("MemAvailable:", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 1024) * 1024
    headrooms = [_headroom(folder, files) for folder, files in _cgroups(proc / "self/cgroup", cgroup_root)]
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


def _cgroups(membership: Path, root: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """The process's control group and all groups around it; a limit may be set on any of them."""
    lines = membership.read_text(encoding="utf-8").splitlines() if membership.exists() else []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if is_v1 or not controllers:
            mount, path = root / "memory" if is_v1 else root, Path(name.lstrip("/"))
            yield from ((mount / part, _V1 if is_v1 else _V2) for part in (path, *path.parents))


def _headroom(folder: Path, files: _CgroupFiles) -> int | None:
    """What is left of the group's limit, file cache that can be dropped not counted; None without a limit."""
    limit = folder / files.limit
    text = limit.read_text(encoding="ascii").strip() if limit.exists() else "max"
    if text == "max":
        return None
    used, stat = int((folder / files.used).read_text(encoding="ascii")), _fields(folder / "memory.stat")
    return int(text) - used + sum(stat.get(name, 0) for name in files.droppable)


def _fields(file: Path) -> dict[str, int]:
    """A file of `name value` lines; of lines with more, the first value."""
    lines = (line.split() for line in file.read_text(encoding="ascii").splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
