"""One worker process of a campaign: enters the run, plans it by hand, works with the fake engine.

    python -m tests.campaigns.worker OUT ROWS SHARD_ROWS [--kind KIND] [--n N] [--step-s S] [--ttl-s S]

Exit codes are those of `bulkrun submit`. The rows are a function of ROWS alone, so any process can make the oracle.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from pathlib import Path

from bulkrun.errors import BulkrunError, Interrupted
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.work.runner import RunOutcome
from tests.campaigns.kinds import KINDS
from tests.job.small_runs import Row, job, make_rows, oracle, results, start


def campaign_rows(count: int) -> list[Row]:
    """Rows with error rows and shared prompts."""
    return make_rows(count, error_every=11, duplicate_every=6)


def campaign_job(out: Path, kind: str, n: int) -> JobSpec:
    """`n` outputs of a row, of text."""
    if kind != "text":
        return KINDS[kind].job(out)
    return job(out, n=n, temperature=0.0 if n == 1 else 0.8, max_tokens=24)


def wrong(out: Path, rows: int, kind: str, n: int) -> bool:
    """Whether the results are not those of an unbroken run."""
    spec, made = campaign_job(out, kind, n), KINDS[kind]
    if kind == "text":
        return results(out) != oracle(campaign_rows(rows), spec)
    return made.results(out) != made.oracle(campaign_rows(rows), spec)


def work(arguments: argparse.Namespace, stop: threading.Event) -> RunOutcome:
    engine = KINDS[arguments.kind].make_engine(arguments.max_num_seqs, step_s=arguments.step_s)
    return start(
        arguments.out,
        KINDS[arguments.kind].rows(campaign_rows(arguments.rows)),
        campaign_job(arguments.out, arguments.kind, arguments.n),
        shard_rows=arguments.shard_rows,
        engine=engine,
        should_stop=stop.is_set,
        ttl_s=arguments.ttl_s,
        heartbeat_s=arguments.ttl_s / 10,
    )


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("rows", type=int)
    parser.add_argument("shard_rows", type=int)
    parser.add_argument("--kind", choices=tuple(KINDS), default="text")
    parser.add_argument("--n", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--ttl-s", type=float, default=2.0)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        outcome = work(parse(argv), stop)
    except BulkrunError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return outcome.totals.exit_code if outcome.totals else Interrupted.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
