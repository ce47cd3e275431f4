"""Random walk over a run's whole life: every command that a user has in the months after the first run.

    python -m tests.campaigns.long_life --steps 1000 --seed 0 [--life 40] [--only 17] [--bucket 0.3]

Each life is one run of some forty steps. Between two commands its input changes: rows come, change, go and move, files
are renamed, split and written in another format, columns come and go. The commands are nights, plain and partitioned
runs, limits, refreshes, retries with other settings, `compact`, `--fresh`, `--resume-anyway`; rows fail in the template
and in the engine, and a command may be killed or drained at any durable operation, then gone on with or not. The
engine is the tests' fake one. Some lives have their results in a bucket of a local store, where a command may also be
killed between two requests or pieces of an upload, and where somebody deletes objects. After each step a plain
DuckDB glob must show what a plain dictionary says
(`oracle`), and all other views must agree with the glob (`run.look`). Prints one JSON line; a failure names
the life, which `--only` lives again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.campaigns.long_life.bucket import Bucket, Store
from tests.campaigns.long_life.life import Divergence, Life


def live(seed: int, steps: int, bucket: Bucket | None) -> Counter[str]:
    """One life; raises Divergence with what was done before."""
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # fsync costs nothing there
    with tempfile.TemporaryDirectory(dir=memory) as scratch:
        life = Life(Path(scratch), seed, bucket)
        try:
            for _ in range(steps):
                life.step()
        except Divergence as problem:
            if kept := os.environ.get("KEEP_LIFE"):
                shutil.copytree(scratch, kept, dirs_exist_ok=True)
            done = "\n  ".join([f"life {seed}: {life.steps}", *life.trace])
            raise Divergence(f"{done}\n{problem}\nagain: --only {seed} --life {steps}") from problem
    return life.tally


def campaign(options: argparse.Namespace) -> dict[str, Any]:
    """Lives until the steps are used up."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # threads do not survive a fork
    tally: Counter[str] = Counter()
    lives = range(options.seed, options.seed + -(-options.steps // options.life))
    seeds = lives if options.only is None else [options.only]
    with Store() as store:
        for seed in seeds:
            bucket = bucket_of(seed, options.bucket, store)
            tally += live(seed, options.life, bucket)
            tally["lives"] += 1
            tally["buckets"] += bucket is not None
    return dict(tally)


def bucket_of(seed: int, share: float, store: Store) -> Bucket | None:
    """A bucket in this share of all lives; in half of them objects are uploaded in several pieces."""
    rng = random.Random(f"bucket {seed}")
    if rng.random() >= share:
        return None
    return store.bucket(f"life-{seed}", rng.choice([2500, 2**25]))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first life; the next has the next one")
    parser.add_argument("--life", type=int, default=40, help="steps of a life")
    parser.add_argument("--only", type=int, default=None, help="the life of this seed alone")
    parser.add_argument("--bucket", type=float, default=0.3, help="the share of lives with results in a bucket")
    return parser.parse_args(argv)


if __name__ == "__main__":
    print(json.dumps(campaign(parse())))
