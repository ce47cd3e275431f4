"""Measures everything where there is a GPU, in calls of at most ten minutes: each does what is still missing.

    python -m tests.benchmarks.gpu --minutes 9 --out DIR            # the worthiest that is missing, until time is over
    python -m tests.benchmarks.gpu --stages report --out DIR        # markdown for README and LOG
    python -m tests.benchmarks.gpu --smoke --out DIR                # every stage, tiny, on a CPU: does the script work?

Stages, in the order of their worth: `kernels` (the GPU tests of bfloat16, in several processes where pytest-xdist is
there), `small` (the issue's target for 0.6B: the first steps of an engine), `targets` (its others, sized for the lease;
then with the 3,000 requests that it asks for), `correct` (all of pytest -m gpu, then alone what fills the card),
`vllm` (the peer in turn with ours; only with `--vllm`), `ablations`, `ops` (each Triton op alone), `load` (a 16 GB
checkpoint against the disk, first token). Each result is a JSON line in DIR/results.jsonl (default: $OUT) with the
prediction beside it, written when it is there, before that a line that it began; all that was printed is in
DIR/log.txt. What hangs or is killed takes only itself along. What an earlier call's file (`--earlier`) or this one
holds is not measured again; what does not fit into the time is not begun, and a line says so. Printed is the worthiest
last, which is what a cut output keeps; DIR/report.md has it first. The report, asked for by name, adds what 3,000
requests would have given where fewer ran: it simulates, a minute on any CPU, so make it here.

What calls have given lies in `measured/`: copy such a file to .earlier/ below to go on from there.

On a lent device machine (thirty minutes in all, ten a call, a start took half of one; the machine goes back after 30
idle seconds) nothing is installed. Once, here, in the repository's root:

    mkdir -p .whl .earlier; printf '/.whl/\\n/.earlier/\\n/.peer/\\n' >> .git/info/exclude
    T=$(for n in 17 24 27 28 31 34 35; do echo --platform manylinux_2_${n}_x86_64; done)
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $T \\
      --platform manylinux2014_x86_64 -d .whl $(.venv/bin/pip list --format=freeze | grep -iE \\
      '^(pydantic|pydantic.core|annotated.types|typing.inspection|typing.extensions|duckdb|llguidance|jsonschema|jsonschema.specifications|referencing|rpds.py)==')

That is 30 MB. Then two calls with `kind: "nvidia-h200"` (predictions and guesses are its; without a kind comes an H100,
by simulation 1.1 to 1.3 times as slow and with half the pool) and `carry: [".whl", ".earlier"]`. Both begin with

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site \\
      .whl/*.whl || exit; export PYTHONPATH=/tmp/site TRITON_CACHE_DIR=$PWD/build/triton

The first one (`timeout_s: 330`) looks whether kernels and engine work, before time is spent on numbers:

    python3 -m tests.benchmarks.gpu --commit $COMMIT --stages kernels small --minutes 4.5 --earlier .earlier/*.jsonl
    mkdir -p build/earlier; cp $OUT/results.jsonl build/earlier/1.jsonl

If it failed, let the machine go, mend, and make the first call again. Else at once, while the machine is warm, the
second (`timeout_s: 600`):

    python3 -m tests.benchmarks.gpu --commit $COMMIT --stages small targets correct ops --left $LEFT --warm \\
      --earlier .earlier/*.jsonl build/earlier/*.jsonl

Kernels compiled in one call (`tar cJf $OUT/triton.tar.xz -C build triton`, 12 MB) serve the next machine too, and an
environment here with Python 3.12 and the machine's torch, Triton and transformers is the same to the bit.

COMMIT: `git rev-parse --short HEAD` here, since .git stays here; LEFT: `budget_left_s` of the first reply. Where the
machine was not held, without `--warm`. Copy each results.jsonl to .earlier/: a later session's calls go on from there,
with `--stages targets correct ops ablations load`. Then, here: `--stages report --earlier .earlier/*.jsonl --out DIR`.

The peer needs a session of its own: its wheels are 330 MB, a call carries 64 MiB with the tree's 16, so eight calls
without a pause (30 s lose what was brought) before the one that measures. The pieces of get_wheels.sh are too large:

    bash ../shared/testing/vllm_peer/get_wheels.sh .peer; rm -rf .peer/piece-* .peer/vllm.part-*
    cp ../shared/testing/vllm_peer/bench_vllm.py .peer/wheels/
    tar c -C .peer/wheels . | split -b 46m -d - .peer/part-

Each part with `carry: [".peer/part-00"]`, `kind: "nvidia-h200"`: `mkdir -p /tmp/parts; cp .peer/part-* /tmp/parts/`.
Then, with `carry: [".whl"]`, the first line above and these:

    mkdir -p /tmp/vllm; cat /tmp/parts/part-* | tar x -C /tmp/vllm
    python3 -m pip install -q --no-index --no-deps --no-compile --target /tmp/vllm/site /tmp/vllm/*.whl
    python3 -m tests.benchmarks.gpu --stages vllm --vllm /tmp/vllm --commit $COMMIT --left $LEFT --warm
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.gpu.hardware import hardware
from tests.benchmarks.gpu.report import report_parts
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.session import Session
from tests.benchmarks.gpu.stages import STAGES
from tests.benchmarks.machine import commit

_START_S = 60.0  # of a machine; five took 31 to 36
_AROUND_S = 50.0  # the pause since the last call, copying, installing wheels, the close
_LONGEST_CALL_S = 580.0  # of ten minutes: wheels are installed before


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
    parts = report_parts(results.lines())
    if "report" in args.stages:
        from tests.benchmarks.gpu.simulated import at_asked_requests  # loads torch: seconds of a lease

        parts.append(at_asked_requests(results.lines()))
    (args.out / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    print("\n\n".join(reversed(parts)))


def call_seconds(left_s: float, num_calls: int, *, is_warm: bool) -> float:
    """How long this call may measure, so that as much is left to each of the others, of which each pays for a start."""
    starts_s = _START_S * (num_calls - is_warm)
    return min(_LONGEST_CALL_S, (left_s - starts_s) / num_calls - _AROUND_S)


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
