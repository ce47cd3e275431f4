"""What every peer's process does around its engine: read the requests, load, warm up, run, print one JSON line.

Runs in the environment of any peer: standard library only. Knows no engine; a peer hands over a function that loads
one and returns the function that serves requests. Load time is not part of the wall time, importing libraries is part
of the load time, and the warm-up has prompts of its own, so that nothing of the workload lies in a prefix cache.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.benchmarks.invoice import SCHEMA, is_invoice
from tests.benchmarks.work import Work, read_work

Generate = Callable[[list[Work]], list[list[int]]]
_WARM_UP_REQUESTS, _WARM_UP_TOKENS = 64, 4


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: temperature 0 greedily; top_p 1 and top_k 0 filter nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Its fields as options."""
        for name in ("temperature", "top_p", "top_k"):
            default = getattr(cls(), name)
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)

    @classmethod
    def of(cls, args: argparse.Namespace) -> Sampling:
        """From a parsed command line."""
        return cls(args.temperature, args.top_p, args.top_k)

    def arguments(self) -> list[str]:
        """The command line that it is read from."""
        return [f"--temperature={self.temperature}", f"--top-p={self.top_p}", f"--top-k={self.top_k}"]


GREEDY = Sampling()
DTYPES = ("bfloat16", "float32", "int8", "int4", "w4a8")  # the last three: bfloat16 with such weights
ROUNDED_INPUTS = ("int8", "w4a8")  # what is multiplied by the weights is rounded to 8 bits per token, as OpenVINO does


@dataclass(frozen=True, slots=True)
class Options:
    """What a peer is told. `model` is in the peer's own format; `dtype`: one of DTYPES.

    `schema` is what outputs have to look like, which then end with the document; None: they have an exact length.
    """

    model: Path
    work: Path
    dtype: str
    threads: int
    first_alone: bool
    tokens_out: Path | None
    sampling: Sampling
    schema: dict[str, Any] | None = None

    @property
    def computed_in(self) -> str:
        """What goes from layer to layer."""
        return self.dtype if self.dtype == "float32" else "bfloat16"

    @classmethod
    def parse(cls) -> Options:
        """Read the command line that `runner.py` writes."""
        parser = argparse.ArgumentParser()
        parser.add_argument("--model", type=Path, required=True)
        parser.add_argument("--work", type=Path, required=True)
        parser.add_argument("--dtype", choices=DTYPES, required=True)
        parser.add_argument("--threads", type=int, required=True)
        parser.add_argument("--first-alone", action="store_true", help="finish request 0 before the others are sent")
        parser.add_argument("--tokens-out", type=Path, help="write the output tokens there, as a JSON list of lists")
        parser.add_argument("--invoices", action="store_true", help="outputs are JSON by the schema of invoice.py")
        Sampling.add_arguments(parser)
        args = parser.parse_args()
        of_work = (args.model, args.work, args.dtype, args.threads, args.first_alone, args.tokens_out)
        return cls(*of_work, Sampling.of(args), SCHEMA if args.invoices else None)


class CpuClock:
    """CPU seconds of this process and of the whole machine, from its start on."""

    def __init__(self) -> None:
        self._own, self._busy, self._wall = _own_s(), _busy_s(), time.perf_counter()

    def read(self) -> dict[str, float]:
        """wall_s, cpu_s (ours), and the share of the machine's CPU time that went to others."""
        wall, own, busy = time.perf_counter() - self._wall, _own_s() - self._own, _busy_s() - self._busy
        others = max(0.0, busy - own) / (wall * (os.cpu_count() or 1))
        return {"wall_s": round(wall, 3), "cpu_s": round(own, 3), "others_cpu_share": round(others, 3)}


def run_peer(load: Callable[[Options], Generate], *packages: str) -> None:
    """The whole life of a peer's process. `packages` are those whose versions the result names."""
    options = Options.parse()
    work = read_work(options.work)
    start = time.perf_counter()
    generate = load(options)
    load_s = time.perf_counter() - start
    generate([Work(prompt[::-1], _WARM_UP_TOKENS) for prompt, _ in work[:_WARM_UP_REQUESTS]])
    clock = CpuClock()
    outputs = serve(generate, work, first_alone=options.first_alone)
    times = clock.read()
    if options.schema is None:
        check_output_lengths(work, outputs)
    else:
        check_documents(options.model, outputs)
    if options.tokens_out is not None:
        options.tokens_out.write_text(json.dumps(outputs), encoding="utf-8")
    print(json.dumps(result_line(work, outputs, load_s, times, packages)), flush=True)


def serve(generate: Generate, work: list[Work], *, first_alone: bool) -> list[list[int]]:
    """Output tokens of every request; with `first_alone`, request 0 is served before the others are sent."""
    if first_alone:
        return generate(work[:1]) + generate(work[1:])
    return generate(work)


def check_output_lengths(work: list[Work], outputs: list[list[int]]) -> None:
    """A speed counts only if every request got all of its tokens."""
    lengths = [(len(output), one.num_output_tokens) for one, output in zip(work, outputs, strict=True)]
    wrong = [i for i, (got, wanted) in enumerate(lengths) if got != wanted]
    if wrong:
        got, wanted = lengths[wrong[0]]
        raise SystemExit(f"{len(wrong)} requests have the wrong length; request {wrong[0]}: {got} instead of {wanted}")


def check_documents(model: Path, outputs: list[list[int]]) -> None:
    """A speed counts only if every output is what was asked for."""
    from tokenizers import Tokenizer

    texts = Tokenizer.from_file(str(model / "tokenizer.json")).decode_batch(outputs)
    wrong = [text for text in texts if not is_invoice(text)]
    if wrong:
        raise SystemExit(f"{len(wrong)} of {len(texts)} outputs are no invoices, as {wrong[0]!r}")


def result_line(
    work: list[Work], outputs: list[list[int]], load_s: float, times: dict[str, float], packages: tuple[str, ...]
) -> dict[str, object]:
    """What the process prints."""
    num_output = sum(map(len, outputs))
    return {
        "load_s": round(load_s, 2),
        **times,
        "output_tokens": num_output,
        "total_tokens": num_output + sum(len(one.prompt_token_ids) for one in work),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "versions": {package: version(package) for package in packages},
    }


def _own_s() -> float:
    return sum(os.times()[:4])


def _busy_s() -> float:
    """CPU seconds anybody used since the machine started, taken by other guests included."""
    fields = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
