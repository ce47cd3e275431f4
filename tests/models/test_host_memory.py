"""Free RAM under made-up /proc and cgroup folders; zeros that take memory when they are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bulkrun.models.host_memory import available_ram_bytes, untouched_zeros

GIB = 2**30


def _system(tmp_path: Path, limits: dict[str, str], version: int = 2) -> int:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\nHugePages_Total: 0\n")
    memberships = ["0::/slurm/job_7"] if version == 2 else ["4:cpu:/other", "3:cpuset,memory:/slurm/job_7", "0::/"]
    (proc / "self/cgroup").write_text("\n".join(memberships) + "\n")
    files = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    total = "" if version == 2 else "total_"
    for name, limit in limits.items():
        folder = (root if version == 2 else root / "memory") / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / files[0]).write_text(limit + "\n")
        (folder / files[1]).write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon {GIB}\n{total}active_file {GIB}\n{total}inactive_file {GIB}\n")
    return available_ram_bytes(proc, root)


def test_without_limits_it_is_what_the_system_says(tmp_path: Path) -> None:
    assert _system(tmp_path, {}) == 8 * GIB


def test_unlimited_group_does_not_count(tmp_path: Path) -> None:
    assert _system(tmp_path, {"slurm/job_7": "max"}) == 8 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_limit_of_the_group_counts_without_droppable_file_cache(tmp_path: Path, version: int) -> None:
    assert _system(tmp_path, {"slurm/job_7": str(4 * GIB)}, version) == 3 * GIB


@pytest.mark.parametrize(("version", "unlimited"), [(2, "max"), (1, str(2**63 - 4096))])
def test_limit_of_a_group_around_it_counts_too(tmp_path: Path, version: int, unlimited: str) -> None:
    assert _system(tmp_path, {"slurm/job_7": unlimited, "slurm": str(2 * GIB)}, version) == 1 * GIB


def test_overdrawn_limit_leaves_nothing(tmp_path: Path) -> None:
    assert _system(tmp_path, {"slurm": str(GIB // 2)}) == 0


def test_this_machine_has_some() -> None:
    assert 0 < available_ram_bytes() < 2**50


@pytest.mark.parametrize("huge_pages", [False, True])
def test_zeros_take_memory_when_they_are_written(huge_pages: bool) -> None:
    def anonymous_bytes() -> int:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

    before = anonymous_bytes()
    zeros = untouched_zeros((2**14, 2**13), torch.bfloat16, huge_pages=huge_pages)
    assert zeros.shape == (2**14, 2**13) and zeros.dtype == torch.bfloat16
    assert anonymous_bytes() - before < 2**23
    zeros[: 2**13] = 1.0
    assert 2**27 <= anonymous_bytes() - before < 2**27 + 2**23
    assert not zeros[2**13].any() and not zeros[-1].any()
    del zeros
    assert anonymous_bytes() - before < 2**23


def test_more_than_there_can_be_is_an_error() -> None:
    with pytest.raises(OSError, match="Cannot allocate memory"):
        untouched_zeros((2**23, 2**23), torch.float32, huge_pages=True)
