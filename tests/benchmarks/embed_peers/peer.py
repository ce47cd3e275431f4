"""What every peer's process does around its engine: read the texts, load, warm up, embed, print one JSON line.

Runs in the environment of any peer: standard library and NumPy. Tokenizing is part of the wall time, as it is for
users; loading is not.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.benchmarks.cpu_peers.peer import CpuClock

Embed = Callable[[list[str]], npt.NDArray[np.float32]]
_WARM_UP_TEXTS = 64


@dataclass(frozen=True, slots=True)
class Options:
    """What a peer is told."""

    model: Path
    texts: Path
    dtype: str
    threads: int
    vectors_out: Path

    @classmethod
    def parse(cls) -> Options:
        """Read the command line that `__main__.py` writes."""
        parser = argparse.ArgumentParser()
        for name, kind in (("model", Path), ("texts", Path), ("dtype", str), ("threads", int), ("vectors-out", Path)):
            parser.add_argument(f"--{name}", type=kind, required=True)
        return cls(**vars(parser.parse_args()))


def run_peer(load: Callable[[Options], Embed], *packages: str) -> None:
    """The whole life of a peer's process. `packages` are those whose versions the result names."""
    options = Options.parse()
    texts: list[str] = json.loads(options.texts.read_text(encoding="utf-8"))
    start = time.perf_counter()
    embed = load(options)
    load_s = time.perf_counter() - start
    embed([text[::-1] for text in texts[:_WARM_UP_TEXTS]])
    clock = CpuClock()
    vectors = embed(texts)
    times = clock.read()
    np.save(options.vectors_out, np.asarray(vectors, np.float32))
    result = {
        "load_s": round(load_s, 2),
        **times,
        "texts": len(texts),
        "dimensions": int(vectors.shape[1]),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "versions": {package: version(package) for package in packages},
    }
    print(json.dumps(result), flush=True)
