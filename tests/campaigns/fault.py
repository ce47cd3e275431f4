"""One failing file-system operation, for every operation of a run: a clean error, then a resume that ends right.

    python -m tests.campaigns.fault [--every K] [--kind text|vectors|lists|labels|calls]

The faults: EIO before the operation, EIO after it (done, but the reply is lost), EDQUOT before it, a disk that is full
from that operation on, and one that is read-only from there on (as ext4 makes itself where it finds an error). Prints
one JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bulkrun.errors import BulkrunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.verify import verify_run
from tests.campaigns.kinds import KINDS, Kind
from tests.campaigns.mounts import mounted
from tests.job.small_runs import make_rows, start

ROWS, SHARD_ROWS = 17, 6
FAULTS = (("EIO", "before"), ("EIO", "after"), ("EDQUOT", "before"), ("ENOSPC", "sticky"), ("EROFS", "sticky"))


@dataclass
class Found:
    """Runs with a fault, how many of them ended with a clean error, and what went wrong."""

    operations: int = 0
    runs: int = 0
    clean_errors: int = 0
    violations: list[str] = field(default_factory=list)


def submit(kind: Kind, out: Path) -> None:
    spec, engine = kind.job(out, checkpoint_every=0.001), kind.make_engine()
    start(out, kind.rows(make_rows(ROWS)), spec, shard_rows=SHARD_ROWS, engine=engine, ttl_s=0.2, heartbeat_s=60.0)


def with_fault(scratch: Path, out: Path, number: int, error: str, when: str, kind: Kind, found: Found) -> None:
    """Run with operation `number` failing, then once more without: the oracle's result and nothing else."""
    rule, name = scratch / "disk.rule", f"operation {number} {error} {when}"
    rule.write_text(f"{count(scratch) + number} {error} {when}")
    found.runs += 1
    try:
        submit(kind, out)
    except BulkrunError:
        found.clean_errors += 1
    finally:
        rule.unlink()
    try:
        submit(kind, out)
    except BulkrunError as failure:
        found.violations.append(f"{name}: resume: {failure}")
        return
    if kind.results(out) != kind.oracle(make_rows(ROWS), kind.job(out)):
        found.violations.append(f"{name}: rows lost, doubled or changed")
    found.violations += [f"{name}: {problem}" for problem in verify_run(RunDir(out)).problems]


def count(scratch: Path) -> int:
    """Operations so far."""
    return len((scratch / "disk.log").read_text().splitlines())


def campaign(scratch: Path, *, every: int = 1, kind: str = "text") -> Found:
    (scratch / "disk").mkdir()
    found = Found()
    with mounted("tests.campaigns.fault_fs", scratch / "mnt", str(scratch / "disk"), str(scratch / "mnt")) as mount:
        before = count(scratch)
        submit(KINDS[kind], mount / "clean")
        found.operations = count(scratch) - before
        for number in range(1, found.operations + 1, every):
            for error, when in FAULTS:
                with_fault(scratch, mount / f"run-{found.runs}", number, error, when, KINDS[kind], found)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--kind", choices=tuple(KINDS), default="text")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(asdict(campaign(Path(folder), every=given.every, kind=given.kind))))
