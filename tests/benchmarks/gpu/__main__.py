"""Measures everything where there is a GPU, in stages that fit into calls of ten minutes.

    python -m tests.benchmarks.gpu --stages correct targets-1 --minutes 9 --out DIR
    python -m tests.benchmarks.gpu --stages report --out DIR        # markdown for README and LOG
    python -m tests.benchmarks.gpu --smoke --out DIR                # every stage, tiny, on a CPU: does the script work?

Stages: `correct` (pytest -m gpu, in eight processes where pytest-xdist is there, then alone what fills the card), `ops`
(each Triton op alone), `load` (a 16 GB checkpoint against the disk, first token), `targets-1` and `targets-2` (the
issue's), `ablations`, `vllm` (its peer in turn with ours), `report`. Each result is a JSON line in DIR/results.jsonl
(default: $OUT) with the prediction beside it, written when it is there; what an earlier call's file (`--earlier`) or
this one holds is not measured again. `--minutes` bounds the call; what a stage leaves, the later ones get. Where the
requests asked for do not fit, fewer run and the line says how many.

On a lent device machine (ten minutes a call, thirty in all) nothing is installed. Once, here, in the repository's root:

    mkdir -p .whl .earlier; printf '/.whl/\\n/.earlier/\\n' >> .git/info/exclude
    T=$(for n in 17 24 27 28 31 34 35; do echo --platform manylinux_2_${n}_x86_64; done)
    python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp $T \\
      --platform manylinux2014_x86_64 -d .whl $(.venv/bin/pip list --format=freeze | grep -iE \\
      '^(pydantic|pydantic.core|annotated.types|typing.inspection|typing.extensions|duckdb|llguidance|jsonschema|jsonschema.specifications|referencing|rpds.py)==')

That is 30 MB. The three commands, with `carry: [".whl"]` (the third also `.earlier`, into which results.jsonl of the
first two was copied as 1.jsonl and 2.jsonl):

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target /tmp/site .whl/*.whl &&
      PYTHONPATH=/tmp/site python3 -m tests.benchmarks.gpu --minutes 9 --stages correct targets-1
    (the same) --stages targets-2
    (the same) --stages ops load ablations report --earlier .earlier/*.jsonl

The peer needs a lease of its own: its wheels are 330 MB, a call carries 64. get_wheels.sh beside bench_vllm.py cuts
them into pieces; carry one a call to /tmp/vllm while the machine is warm, install them into /tmp/vllm/site, copy
bench_vllm.py to /tmp/vllm, then `--stages vllm --vllm /tmp/vllm`.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.gpu.report import report
from tests.benchmarks.gpu.results import Results
from tests.benchmarks.gpu.stages import STAGES, Session


def main() -> None:
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    results = Results(args.out / "results.jsonl", tuple(args.earlier))
    names = [name for name in args.stages if name != "report"]
    end = time.monotonic() + 60 * args.minutes
    for number, name in enumerate(names):
        seconds = (end - time.monotonic()) / (len(names) - number)
        print(f"{name}: at most {seconds:.0f} s", file=sys.stderr, flush=True)
        STAGES[name](Session(results, seconds, args.smoke, args.vllm))
    text = report(results.lines())
    (args.out / "report.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    everything = [*STAGES, "report"]
    parser.add_argument("--stages", nargs="+", choices=everything, default=everything)
    parser.add_argument("--minutes", type=float, default=9.0, help="for all stages of this call together")
    out = os.environ.get("OUT")
    parser.add_argument("--out", type=Path, default=Path(out) if out else Path(tempfile.gettempdir()) / "bulkrun-gpu")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="results.jsonl of earlier calls")
    parser.add_argument("--vllm", type=Path, help="a folder with bench_vllm.py and site/, where its wheels are")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes on a CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
