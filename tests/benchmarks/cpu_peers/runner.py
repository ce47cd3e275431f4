"""Runs the peers in turn, as processes of their own, and says what came out. Knows no engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.benchmarks.cpu_peers.environments import Workplace
from tests.benchmarks.cpu_peers.peer import GREEDY, Sampling
from tests.benchmarks.cpu_peers.results import Result
from tests.benchmarks.cpu_peers.workloads import STRUCTURED

REPOSITORY = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What is compared."""

    shape: str
    workload: str
    dtype: str
    threads: int
    peers: Sequence[str]
    sampling: Sampling = GREEDY


def run_in_turn(place: Workplace, comparison: Comparison, rounds: int) -> dict[str, list[Result]]:
    """A B C A B C: results of each peer, round by round. A peer that fails is reported and left out from then on."""
    results: dict[str, list[Result]] = {peer: [] for peer in comparison.peers}
    failed: set[str] = set()
    for _ in range(rounds):
        for peer in comparison.peers:
            if peer in failed:
                continue
            result = run_peer_process(place, comparison, peer)
            if result is None:
                failed.add(peer)
                continue
            results[peer].append(result)
            print(f"{peer}: {json.dumps(result)}", file=sys.stderr)
    return {peer: runs for peer, runs in results.items() if runs}


def run_peer_process(
    place: Workplace, comparison: Comparison, peer: str, tokens_out: Path | None = None
) -> Result | None:
    """One run of one peer; None, with its last words on stderr, where it fails."""
    done = subprocess.run(
        [place.python(peer), "-m", f"tests.benchmarks.cpu_peers.peer_{peer}", *_arguments(place, comparison, peer)]
        + (["--tokens-out", str(tokens_out)] if tokens_out is not None else []),
        cwd=REPOSITORY,
        env=place.variables(peer, comparison.threads),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        print(f"{peer} failed ({done.returncode}):\n{done.stderr[-1500:]}", file=sys.stderr)
        return None
    return last_json_line(done.stdout)


def last_json_line(output: str) -> Result:
    """The result among whatever else a library prints."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    assert lines, f"a peer that ends well prints a result: {output[-500:]!r}"
    result: Result = json.loads(lines[-1])
    return result


def _arguments(place: Workplace, comparison: Comparison, peer: str) -> Iterator[str]:
    yield from ("--model", str(place.model(peer, comparison.shape, comparison.dtype)))
    yield from ("--work", str(place.work(comparison.shape, comparison.workload)))
    yield from ("--dtype", comparison.dtype, "--threads", str(comparison.threads))
    yield from comparison.sampling.arguments()
    if peer == "openvino" and comparison.workload == "shared-prefix":
        yield "--first-alone"
    if comparison.workload == STRUCTURED:
        yield "--invoices"
