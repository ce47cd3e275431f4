"""Measures everything where there is a GPU, in calls of at most ten minutes: each does what is still missing.

    python -m tests.benchmarks.gpu --minutes 9 --out DIR            # the worthiest that is missing, until time is over
    python -m tests.benchmarks.gpu --stages report --out DIR        # markdown for README and LOG
    python -m tests.benchmarks.gpu --smoke --out DIR                # every stage, tiny, on a CPU: does the script work?

Stages, in the order of their worth: `correct` (pytest -m gpu, in eight processes where pytest-xdist is there, then
alone what fills the card), `targets` (the issue's: 1024/256, 512/512 and 2048/128 with the 3,000 requests that it asks
for, then others with fewer, fp8 KV, shared prefix, 0.6B), `vllm` (the peer in turn with ours; only with `--vllm`),
`ablations`, `ops` (each Triton op alone), `load` (a 16 GB checkpoint against the disk, first token). Each result is a
JSON line in DIR/results.jsonl (default: $OUT) with the prediction beside it, written when it is there, and all that was
printed is in DIR/log.txt. What an earlier call's file (`--earlier`) or this one holds is not measured again; what does
not fit into the time is not begun, and a line says so. The report, asked for by name, adds what 3,000 requests would
have given where fewer ran: it simulates, a minute on any CPU, so make it here.

On a lent device machine (ten minutes a call, thirty in all, a start takes one or two of them; the machine goes back
after 30 idle seconds) nothing is installed. Once, here, in the repository's root:

    mkdir -p .whl .earlier; printf '/.whl/\\n/.earlier/\\n/.peer/\\n' >> .git/info/exclude
    T=$(for n in 17 24 27 28 31 34 35; do echo --platform manylinux_2_${n}_x86_64; done)
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $T \\
      --platform manylinux2014_x86_64 -d .whl $(.venv/bin/pip list --format=freeze | grep -iE \\
      '^(pydantic|pydantic.core|annotated.types|typing.inspection|typing.extensions|duckdb|llguidance|jsonschema|jsonschema.specifications|referencing|rpds.py)==')

That is 30 MB. Then this, three times, with `kind: "nvidia-h200"` (predictions and guesses are its; without a kind
comes an H100, by simulation 1.1 to 1.3 times as slow and with half the pool), `timeout_s: 600` and
`carry: [".whl", ".earlier"]`:

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site \\
      .whl/*.whl && PYTHONPATH=/tmp/site python3 -m tests.benchmarks.gpu --commit $COMMIT --left 1800 --calls 3 \\
      --earlier .earlier/*.jsonl /tmp/earlier/*.jsonl
    mkdir -p /tmp/earlier; cp $OUT/results.jsonl /tmp/earlier/$CALL.jsonl

COMMIT: `git rev-parse --short HEAD` here, since .git stays here; CALL: 1, 2, 3. `--left`: the device seconds left
before the call (`budget_left_s` of `status` and of the last reply); `--calls`: how many calls share them. Call again at
once, with `--warm`: the machine is still held, no start is paid for and /tmp/earlier is there. Copy each results.jsonl
to .earlier/ all the same, for when it is not. Then, here: `--stages report --earlier .earlier/*.jsonl --out DIR`.

The peer needs a session of its own: its wheels are 330 MB, a call carries 64 MiB with the tree's 15 MB, so seven calls
without a pause (30 s lose what was brought) before the one that measures. The pieces of get_wheels.sh are too large:

    bash /work/shared/testing/vllm_peer/get_wheels.sh .peer; rm -rf .peer/piece-* .peer/vllm.part-*
    cp /work/shared/testing/vllm_peer/bench_vllm.py .peer/wheels/
    tar c -C .peer/wheels . | split -b 48m -d - .peer/part-

Each part with `carry: [".peer/part-00"]`, `kind: "nvidia-h200"`: `mkdir -p /tmp/parts; cp .peer/part-* /tmp/parts/`.
Then, with `carry: [".whl"]`, twice while time lasts, the first pip line above and these (the first three once;
`--left` and what follows as above):

    mkdir -p /tmp/vllm; cat /tmp/parts/part-* | tar x -C /tmp/vllm
    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/vllm/site /tmp/vllm/*.whl
    rm -r /tmp/parts
    PYTHONPATH=/tmp/site python3 -m tests.benchmarks.gpu --stages vllm --vllm /tmp/vllm --commit $COMMIT --left ...
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.gpu.hardware import hardware
from tests.benchmarks.gpu.report import report
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.session import Session
from tests.benchmarks.gpu.simulated import at_asked_requests
from tests.benchmarks.gpu.stages import STAGES
from tests.benchmarks.machine import commit

_START_S = 120.0  # of a machine, at most
_AROUND_S = 40.0  # installing wheels, copying
_LONGEST_CALL_S = 600.0


def main() -> None:
    args = _arguments()
    seconds = 60 * args.minutes if args.left is None else call_seconds(args.left, args.calls, is_warm=args.warm)
    args.out.mkdir(parents=True, exist_ok=True)
    on = hardware(args.commit or commit())
    results = Results(args.out / "results.jsonl", tuple(args.earlier), on)
    session = Session(results, time.monotonic() + seconds, args.smoke, args.vllm)
    for name in (name for name in STAGES if name in args.stages and (name != "vllm" or args.vllm or args.smoke)):
        print(f"{name}: {session.left_s:.0f} s are left", file=sys.stderr, flush=True)
        STAGES[name](session)
    text = report(results.lines())
    if "report" in args.stages:
        text += f"\n\n{at_asked_requests(results.lines())}"
    (args.out / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def call_seconds(left_s: float, num_calls: int, *, is_warm: bool) -> float:
    """How long this call may measure, so that as much is left to each of the others, of which each pays for a start."""
    starts_s = _START_S * (num_calls - is_warm)
    return min(_LONGEST_CALL_S, (left_s - starts_s) / num_calls) - _AROUND_S


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=[*STAGES, "report"], default=list(STAGES))
    parser.add_argument("--minutes", type=float, default=9.0, help="for all stages of this call together")
    parser.add_argument("--left", type=float, help="device seconds before this call, in place of --minutes")
    parser.add_argument("--calls", type=int, default=1, help="that share what is left, this one among them")
    parser.add_argument("--warm", action="store_true", help="the machine was started before")
    parser.add_argument("--commit", help="what is measured (default: as git says)")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out) if out else Path(tempfile.gettempdir()) / "bulkrun-gpu")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="results.jsonl of earlier calls")
    parser.add_argument("--vllm", type=Path, help="a folder with bench_vllm.py and site/, where its wheels are")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
