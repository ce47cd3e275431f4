"""Power cut after every file-system operation of a run, and what a resume makes of what is left.

    python -m tests.campaigns.powercut [--recipe right|no_fsync|no_dir_fsync|rename_only|no_journal_sync] [--every K]
        [--kind text|vectors|lists|labels|calls]

For each cut and variant: no torn part is visible, everything acknowledged is still there (committed parts, synced
journal records, `_SUCCESS`), and the same command continues to the oracle's result. The broken recipes must be caught.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from bulkrun.data.results import parts
from bulkrun.data.storage import durable
from bulkrun.errors import BulkrunError
from bulkrun.job.store import journal
from bulkrun.job.store.journal import JournalRecord, JournalWriter, read_outcomes
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.work import commit, finish, recorder, runner
from tests.campaigns.kinds import KINDS, Kind
from tests.campaigns.mounts import ROOT, mounted
from tests.job.small_runs import make_rows, start

ROWS, SHARD_ROWS = 17, 6
RECIPES = ("right", "no_fsync", "no_dir_fsync", "rename_only", "no_journal_sync")


@dataclass
class Found:
    """What a campaign found: counts, and the first few violations in words."""

    recipe: str
    operations: int = 0
    cuts: int = 0
    torn: int = 0
    lost: int = 0
    not_resumed: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def violations(self) -> int:
        return self.torn + self.lost + self.not_resumed


def submit(kind: Kind, out: Path, **options: Any) -> None:
    spec = kind.job(out, checkpoint_every=0.001)
    start(out, kind.rows(make_rows(ROWS)), spec, shard_rows=SHARD_ROWS, engine=kind.make_engine(), **options)


def acknowledge(mount: Path, name: str) -> None:
    (mount / "ack" / name).touch()


def watch(mount: Path) -> None:
    """Make every promise of the code visible to the file system, at the moment it is made."""
    real_commit, real_sync, real_append = commit.commit_shard, JournalWriter.sync, JournalWriter.append
    real_finish = finish.finish_run
    appended: dict[int, list[str]] = {}

    def watched_commit(run: RunDir, shard: int, *rest: Any) -> Any:
        info = real_commit(run, shard, *rest)
        acknowledge(mount, f"part-{shard}")
        return info

    def watched_append(self: JournalWriter, records: Any) -> None:
        records = list(records)
        real_append(self, records)
        done = [record for record in records if isinstance(record, JournalRecord)]
        appended.setdefault(id(self), []).extend(f"row-{row}" for record in done for row in record.rows)

    def watched_sync(self: JournalWriter) -> None:
        real_sync(self)
        for name in appended.pop(id(self), []):
            acknowledge(mount, name)

    def watched_finish(run: RunDir, record: Any) -> Any:
        totals = real_finish(run, record)
        acknowledge(mount, "success")
        return totals

    recorder.commit_shard = watched_commit  # type: ignore[attr-defined]
    runner.finish_run = watched_finish  # type: ignore[attr-defined]
    JournalWriter.append, JournalWriter.sync = watched_append, watched_sync  # type: ignore[method-assign]


def break_it(recipe: str) -> None:
    """Replace the right recipe by a wrong one that looks as if it worked."""

    def nothing(*_: Any) -> None:
        return None

    @contextmanager
    def not_synced(path: Path) -> Iterator[IO[bytes]]:
        with path.open("xb") as file:
            yield file

    def rename_only(tmp: Path, final: Path) -> bool:
        tmp.rename(final)
        return True

    if recipe == "no_fsync":
        os.fsync = nothing  # type: ignore[assignment]
    elif recipe == "no_dir_fsync":
        durable.fsync_dir = journal.fsync_dir = nothing
    elif recipe == "no_journal_sync":
        JournalWriter.sync = nothing  # type: ignore[method-assign, assignment]
    elif recipe == "rename_only":
        commit.publish_new = finish.publish_new = rename_only  # type: ignore[attr-defined]
        parts.new_file = not_synced  # type: ignore[attr-defined]


def drive(mount: Path, recipe: str, kind: Kind) -> None:
    """The run under test, in a process of its own."""
    (mount / "ack").mkdir()
    break_it(recipe)
    watch(mount)
    submit(kind, mount / "out", heartbeat_s=60.0)


def check_cut(cut: Path, promised: list[str], kind: Kind, found: Found) -> None:
    """One state after a power cut: whole parts, kept promises, and a resume that ends as if nothing had been."""
    run = RunDir(cut / "out")
    found.cuts += 1
    try:
        visible = {row["row"] for row in kind.results(run.root)}
    except (pa.ArrowException, OSError) as error:
        found.torn += 1
        return note(found, cut, f"torn part: {error}")
    shards = {int(path.name[6:11]) for path in run.journal.glob("shard-*")}
    journaled = {row for shard in shards for row, _ in read_outcomes(run.journals_of(shard)).answered}
    missing = [name for name in promised if not kept(name, run, visible | journaled)]
    if missing:
        found.lost += 1
        note(found, cut, f"promised and gone: {missing[:3]}")
    try:
        submit(kind, run.root)
        wanted = kind.oracle(make_rows(ROWS), kind.job(run.root))
        assert kind.results(run.root) == wanted, "other results than an unbroken run"
    except (BulkrunError, AssertionError) as error:
        found.not_resumed += 1
        note(found, cut, f"resume: {error}")


def kept(name: str, run: RunDir, rows: set[int]) -> bool:
    kind, _, number = name.partition("-")
    checks: dict[str, Callable[[], bool]] = {
        "part": lambda: run.part(int(number)).exists(),
        "row": lambda: int(number) in rows,
        "success": run.success.exists,
    }
    return checks[kind]()


def note(found: Found, cut: Path, what: str) -> None:
    if len(found.examples) < 5:
        found.examples.append(f"{cut.name}: {what}")


def campaign(recipe: str, scratch: Path, *, every: int = 1, until_caught: bool = False, kind: str = "text") -> Found:
    """Run once with a snapshot after each operation, then check each `every`-th cut (up to the first violation)."""
    snapshots, found = scratch / "snapshots", Found(recipe)
    with mounted("tests.campaigns.powercut_fs", scratch / "mnt", str(scratch / "mnt"), str(snapshots)) as mount:
        drive_command = [sys.executable, "-m", "tests.campaigns.powercut", "--drive", str(mount), "--recipe", recipe]
        drive_command += ["--kind", kind]
        subprocess.run(drive_command, cwd=ROOT, check=True, timeout=300)
    acks = [line.split() for line in (snapshots / "acks").read_text().splitlines()]
    found.operations = len((snapshots / "ops").read_text().splitlines())
    for cut in sorted(path for path in snapshots.iterdir() if path.is_dir()):
        operation = int(cut.name[:5])
        if operation % every == 0 and not (until_caught and found.violations):
            check_cut(cut, [name for at, name in acks if int(at) <= operation], KINDS[kind], found)
        shutil.rmtree(cut)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", choices=RECIPES, default="right")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kind", choices=tuple(KINDS), default="text")
    parser.add_argument("--drive", type=Path)
    given = parser.parse_args()
    if given.drive:
        drive(given.drive, given.recipe, KINDS[given.kind])
    else:
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(asdict(campaign(given.recipe, Path(scratch), every=given.every, kind=given.kind))))
