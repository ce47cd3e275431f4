"""Free RAM under made-up /proc and cgroup folders."""

from __future__ import annotations

from pathlib import Path

from bulkrun.engine.host_memory import available_ram_bytes

GIB = 2**30


def _system(tmp_path: Path, limits: dict[str, str]) -> int:
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    (proc / "self/cgroup").write_text("0::/slurm/job_7\n")
    for name, limit in limits.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{3 * GIB}\n")
        (folder / "memory.stat").write_text(f"anon {GIB}\ninactive_file {2 * GIB}\n")
    return available_ram_bytes(proc, root)


def test_without_limits_it_is_what_the_system_says(tmp_path: Path) -> None:
    assert _system(tmp_path, {}) == 8 * GIB


def test_unlimited_group_does_not_count(tmp_path: Path) -> None:
    assert _system(tmp_path, {"slurm/job_7": "max"}) == 8 * GIB


def test_limit_of_the_group_counts_without_droppable_file_cache(tmp_path: Path) -> None:
    assert _system(tmp_path, {"slurm/job_7": str(4 * GIB)}) == 3 * GIB


def test_limit_of_a_group_around_it_counts_too(tmp_path: Path) -> None:
    assert _system(tmp_path, {"slurm/job_7": "max", "slurm": str(2 * GIB)}) == 1 * GIB


def test_overdrawn_limit_leaves_nothing(tmp_path: Path) -> None:
    assert _system(tmp_path, {"slurm": str(GIB // 2)}) == 0


def test_this_machine_has_some() -> None:
    assert 0 < available_ram_bytes() < 2**50
