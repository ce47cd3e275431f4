"""The command: `setup` makes environments, models and texts, `run` compares: a table and a JSON line.

`run` first compares the vectors in float32 with sentence-transformers' (`--no-check` leaves that out), then times every
peer in turn. Runs during which others had more than 6% of the CPU are marked in the JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.cpu_peers.runner import last_json_line
from tests.benchmarks.embed_peers.places import (
    MODELS,
    PEERS,
    model_dir,
    run_in_environment,
    set_up,
    texts_file,
)
from tests.benchmarks.machine import commit, machine, record

_ORACLE = "sentence_transformers"
_LARGEST_DIFFERENCE = 1e-5  # of a number of a vector of length 1: rounding in float32 over 28 layers


def main() -> None:
    args = _arguments()
    root = args.workdir.resolve()
    if args.command == "setup":
        set_up(root, tuple(args.models), tuple(args.peers))
    else:
        compare(root, args)


def compare(root: Path, args: argparse.Namespace) -> None:
    """Check, run, print; the JSON line also goes to history.jsonl with `--record`."""
    before = machine()
    difference = None if args.no_check else _difference(root, args)
    runs: dict[str, list[dict[str, Any]]] = {peer: [] for peer in args.peers}
    for _ in range(args.rounds):
        for peer in args.peers:
            result, _ = _run(root, args, peer, args.dtype)
            runs[peer].append(result)
            print(f"{peer}: {json.dumps(result)}", file=sys.stderr)
    medians = {peer: statistics.median(run["wall_s"] for run in of_peer) for peer, of_peer in runs.items()}
    for peer, seconds in sorted(medians.items(), key=lambda item: item[1]):
        print(f"{peer:22} {seconds:8.2f} s  {MODELS[args.model] / seconds:8.1f} texts/s")
    result = {
        "benchmark": "embed_peers",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "command": f"python -m tests.benchmarks.embed_peers run --workdir DIR --model {args.model} "
        f"--dtype {args.dtype} --rounds {args.rounds} --peers {' '.join(args.peers)}",
        "times_as_fast_as": {
            peer: round(s / medians["bulkrun"], 2) for peer, s in medians.items() if peer != "bulkrun"
        },
        "largest_difference_in_float32": difference,
        "peers": runs,
        "machine": before,
    }
    print(json.dumps(result))
    if args.record:
        record(result)


def _difference(root: Path, args: argparse.Namespace) -> float:
    """Between our vectors and sentence-transformers' in float32. Exits where it is more than rounding."""
    ours, theirs = (_run(root, args, peer, "float32")[1] for peer in ("bulkrun", _ORACLE))
    difference = float(np.abs(ours - theirs).max())
    print(f"largest difference of a number in float32: {difference:.1e}", file=sys.stderr)
    if not difference < _LARGEST_DIFFERENCE:
        sys.exit(f"bulkrun's vectors are not those of {_ORACLE}")
    return difference


def _run(root: Path, args: argparse.Namespace, peer: str, dtype: str) -> tuple[dict[str, Any], np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        vectors = Path(folder) / "vectors.npy"
        arguments = {"model": model_dir(root, args.model), "texts": texts_file(root, args.model), "dtype": dtype}
        arguments |= {"threads": args.threads, "vectors-out": vectors}
        command = [f"--{name}={value}" for name, value in arguments.items()]
        done = run_in_environment(root, peer, command, args.threads)
        if done.returncode != 0:
            sys.exit(f"{peer} failed ({done.returncode}):\n{done.stderr[-2000:]}")
        return last_json_line(done.stdout), np.load(vectors)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.embed_peers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    setup = commands.add_parser("setup", help="virtual environments, models, texts; what is there is kept")
    setup.add_argument("--models", nargs="+", choices=MODELS, default=tuple(MODELS))
    run = commands.add_parser("run", help="compare the peers on one model")
    run.add_argument("--model", choices=MODELS, default="minilm")
    run.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    run.add_argument("--threads", type=int, default=2)
    run.add_argument("--rounds", type=int, default=3)
    run.add_argument("--no-check", action="store_true", help="do not compare vectors in float32 first")
    run.add_argument("--record", action="store_true", help="append the result to history.jsonl")
    for command in (setup, run):
        command.add_argument("--workdir", type=Path, required=True, help="where the environments and models lie")
        command.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
