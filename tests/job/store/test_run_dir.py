"""Where parts lie: found in folders and in the root, by number, without being told the folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from bulkrun.errors import RunError
from bulkrun.job.store.journal_files import attempts_by_shard, journals_by_shard
from bulkrun.job.store.run_dir import RunDir


def put(run: RunDir, number: int, folder: str) -> Path:
    path = run.part(number, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_part_is_found_in_its_folder_by_its_number_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    paths = {number: put(run, number, folder) for number, folder in enumerate(["", "lang=en", "lang=de/year=1"])}
    assert RunDir(tmp_path).parts() == paths and RunDir(tmp_path).committed_shards() == {0, 1, 2}
    for number, path in paths.items():
        assert RunDir(tmp_path).part(number) == path


def test_a_part_that_appears_later_is_found_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert run.part(3) == tmp_path / "part-00003.parquet" and run.committed_shards() == set()
    path = put(RunDir(tmp_path), 3, "lang=en")
    assert run.part(3) == path and run.committed_shards() == {3}


def test_runs_are_equal_by_their_place_whatever_they_have_seen(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    put(run, 1, "a=b")
    run.parts()
    assert run == RunDir(tmp_path) and hash(run) == hash(RunDir(tmp_path)) and "_seen" not in repr(run)


def test_parts_of_a_staged_run_are_found_by_their_own_ending(tmp_path: Path) -> None:
    staged = RunDir(tmp_path).staged
    path = put(staged, 0, "lang=en")
    assert path.name == "part-00000.staged" and staged.parts() == {0: path}
    assert RunDir(tmp_path).parts() == {}


def test_two_parts_with_one_number_are_refused(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    put(run, 0, "lang=a")
    put(run, 0, "lang=b")
    with pytest.raises(RunError, match=r"has the same number as .*part-00000\.parquet; move away"):
        run.parts()


def test_names_are_read_back_as_they_were_given(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    files = [run.journal_file(shard, worker) for shard, worker in ((3, "a1"), (3, "b2"), (100_000, "a1"))]
    files += [run.flight_file("a1"), run.worker_file("b2"), run.ids(7)]
    files += [run.claims / f"{run.shard_claim(3)}.{epoch}" for epoch in (1, 12)] + [run.claims / "plan.1"]
    for file in [*files, *(file.with_name(f".{file.name}") for file in files)]:  # with a dot: not whole yet
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    assert run.journaled_shards() == {3, 100_000} and run.journals_of(3) == files[:2]
    assert run.attempts_at(3) == {"a1", "b2"} and run.attempts_at(4) == set()
    assert journals_by_shard(run) == {shard: run.journals_of(shard) for shard in (3, 100_000)}
    assert attempts_by_shard(run) == {shard: run.attempts_at(shard) for shard in (3, 100_000)}
    assert run.workers_in_flight() == ["a1"] and run.worker_ids() == ["b2"] and run.id_files() == [run.ids(7)]
    assert [path.name for path in run.claims_of("shard-00003")] == ["shard-00003.1", "shard-00003.12"]


def test_a_shard_is_not_taken_for_one_whose_number_begins_alike(tmp_path: Path) -> None:
    """The journals and claims of a shard go when it is committed."""
    run = RunDir(tmp_path)
    for shard in (10_000, 100_000, 100_001):
        for file in (run.journal_file(shard, "a"), run.claims / f"{run.shard_claim(shard)}.1"):
            file.parent.mkdir(exist_ok=True, parents=True)
            file.touch()
    assert run.journals_of(10_000) == [run.journal_file(10_000, "a")]
    assert run.claims_of(run.shard_claim(10_000)) == [run.claims / "shard-10000.1"]
