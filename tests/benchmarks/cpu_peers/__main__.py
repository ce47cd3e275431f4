"""The command: `setup` makes environments, checkpoints and workloads, `run` compares: a table and a JSON line.

`run` first checks the tokens in float32 (see `agreement.py`; `--no-check` leaves that out), then times every peer in
turn. On a busy machine only ratios mean anything, and little: runs during which others had more than 6% of the CPU are
marked. CPU seconds are less disturbed, but include the waiting of engines whose threads spin.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.checkpoints import SHAPES
from tests.benchmarks.cpu_peers.agreement import check_agreement
from tests.benchmarks.cpu_peers.environments import PEERS, Workplace, set_up
from tests.benchmarks.cpu_peers.peer import DTYPES, Sampling
from tests.benchmarks.cpu_peers.results import ratios, summary, table
from tests.benchmarks.cpu_peers.runner import Comparison, run_in_turn
from tests.benchmarks.cpu_peers.workloads import STRUCTURED, TIMED
from tests.benchmarks.machine import commit, machine, record


def main() -> None:
    args = _arguments()
    place = Workplace(args.workdir.resolve())
    if args.command == "setup":
        set_up(place, tuple(args.models), tuple(args.peers))
    else:
        compare(place, args)


def compare(place: Workplace, args: argparse.Namespace) -> None:
    """Check, run, print; the JSON line also goes to history.jsonl with `--record`."""
    comparison = Comparison(args.model, args.workload, args.dtype, args.threads, args.peers, Sampling.of(args))
    before = machine()
    agreement = {} if args.no_check else check_agreement(place, comparison)
    runs = run_in_turn(place, comparison, args.rounds)
    summaries = {peer: summary(of_peer) for peer, of_peer in runs.items()}
    result = {
        "benchmark": "cpu_peers",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": f"python -m tests.benchmarks.cpu_peers {shlex.join(_without_workdir(sys.argv[1:]))}",
        "model": args.model,
        "workload": args.workload,
        "dtype": args.dtype,
        "threads": args.threads,
        "sampling": asdict(comparison.sampling),
        "times_as_fast_as": ratios(summaries),
        "peers": summaries,
        "float32_agreement": agreement,
        "machine": before,
    }
    print(table(summaries))
    print(json.dumps(result))
    if args.record:
        record(result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.cpu_peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="virtual environments, checkpoints, workloads; what is there is kept")
    setup.add_argument("--models", nargs="+", choices=SHAPES, default=SHAPES)
    run = commands.add_parser("run", help="compare the peers on one model and workload")
    run.add_argument("--model", choices=SHAPES, default="llama-20m")
    run.add_argument("--workload", choices=TIMED, default="small")
    run.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    run.add_argument("--threads", type=int, default=2)
    Sampling.add_arguments(run)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--no-check", action="store_true", help="do not compare tokens in float32 first")
    run.add_argument("--record", action="store_true", help="append the result to history.jsonl")
    for command in (setup, run):
        command.add_argument("--workdir", type=Path, required=True, help="where the environments and models lie")
        command.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    args = parser.parse_args()
    if args.command == "run" and args.workload == STRUCTURED:
        args.peers = [peer for peer in args.peers if peer != "static"]  # transformers knows no schemas
    return args


def _without_workdir(arguments: list[str]) -> list[str]:
    """The command line as it can be repeated elsewhere: history holds no machine's paths."""
    kept = list(arguments)
    if "--workdir" in kept:
        position = kept.index("--workdir")
        kept[position + 1] = "DIR"
    return ["--workdir=DIR" if one.startswith("--workdir=") else one for one in kept]


if __name__ == "__main__":
    main()
