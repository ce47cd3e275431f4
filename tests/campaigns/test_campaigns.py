"""Short slices of the campaigns; each has a long form as a command (see the modules)."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bulkrun.errors import RunError
from tests.campaigns import fault, kill, powercut, updates
from tests.campaigns.kinds import KINDS
from tests.campaigns.mounts import why_no_fuse
from tests.job.small_runs import job, make_rows, oracle, results, start


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """A folder where fsync costs nothing: these campaigns model the disk themselves."""
    in_memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=in_memory if in_memory.is_dir() else tmp_path) as folder:
        yield Path(folder)


needs_fuse = pytest.mark.skipif(why_no_fuse() is not None, reason=why_no_fuse() or "")
takes_minutes = pytest.mark.timeout(1800)  # on a busy machine more than others have


@pytest.mark.parametrize(("workers", "kind"), [(1, "vectors"), (2, "text"), (2, "lists")])
def test_killed_workers_leave_every_row_exactly_once(tmp_path: Path, workers: int, kind: str) -> None:
    command = ["--kills", "4", "--workers", str(workers), "--rows", "150", "--max-life", "1.2", "--seed", str(workers)]
    command += ["--kind", kind]
    tally = kill.campaign(kill.parse(command), tmp_path)
    assert tally.runs >= 1 and tally.failed_reads == 0


@pytest.mark.slow
def test_many_killed_workers_leave_every_row_exactly_once(tmp_path: Path) -> None:
    tally = kill.campaign(kill.parse(["--kills", "60", "--workers", "3"]), tmp_path)
    assert tally.failed_reads == 0 and tally.slowest_term_s < 10


@needs_fuse
@pytest.mark.parametrize(("kind", "every"), [("text", 20), ("vectors", 50)])
def test_a_power_cut_at_any_operation_loses_nothing_promised(memory: Path, kind: str, every: int) -> None:
    found = powercut.campaign("right", memory, every=every, kind=kind)
    assert found.cuts >= 6 and found.violations == 0, found.examples


@needs_fuse
@pytest.mark.parametrize(
    "recipe",
    [
        "no_fsync",
        "rename_only",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("no_dir_fsync", "no_journal_sync")),
    ],
)
def test_a_broken_recipe_is_caught(memory: Path, recipe: str) -> None:
    assert powercut.campaign(recipe, memory, every=8, until_caught=True).violations > 0


@needs_fuse
@pytest.mark.slow
@takes_minutes
@pytest.mark.parametrize("kind", [*KINDS])
def test_a_power_cut_after_every_operation_loses_nothing_promised(memory: Path, kind: str) -> None:
    found = powercut.campaign("right", memory, kind=kind)
    assert found.violations == 0, found.examples


@needs_fuse
@pytest.mark.parametrize(("kind", "every"), [("text", 60)])
def test_a_failing_operation_is_a_clean_error_and_the_run_continues(memory: Path, kind: str, every: int) -> None:
    found = fault.campaign(memory, every=every, kind=kind)
    assert found.clean_errors > 0 and found.violations == []


@needs_fuse
@pytest.mark.slow
@takes_minutes
@pytest.mark.parametrize("kind", [*KINDS])
def test_every_failing_operation_is_a_clean_error_and_the_run_continues(memory: Path, kind: str) -> None:
    assert fault.campaign(memory, kind=kind).violations == []


@needs_fuse
@pytest.mark.parametrize(("what", "every"), [("cuts", 110), pytest.param("faults", 150, marks=pytest.mark.slow)])
def test_a_night_goes_on_after_a_power_cut_or_a_failing_operation(memory: Path, what: str, every: int) -> None:
    found = updates.campaign(what, "night", "vectors", memory, every=every)
    assert found.states >= 8 and found.violations == []


@needs_fuse
@pytest.mark.slow
@takes_minutes
@pytest.mark.parametrize("kind", updates.KINDS)
@pytest.mark.parametrize("change", updates.CHANGES)
@pytest.mark.parametrize("what", ["cuts", "faults"])
def test_nights_and_retries_go_on_after_every_third_operation(memory: Path, what: str, change: str, kind: str) -> None:
    assert updates.campaign(what, change, kind, memory, every=3).violations == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_stops_with_advice_and_goes_on_when_there_is_space(tmp_path: Path) -> None:
    disk, rows = tmp_path / "disk", make_rows(120)
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        spec = job(disk / "out")
        (disk / "ballast").write_bytes(bytes(40 * 1024))
        with pytest.raises(RunError, match="No space left on device; free some space"):
            start(disk / "out", rows, spec, shard_rows=15, ttl_s=0.2)
        (disk / "ballast").unlink()
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        start(disk / "out", rows, spec, shard_rows=15, ttl_s=0.2)
        assert results(disk / "out") == oracle(rows, spec)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
