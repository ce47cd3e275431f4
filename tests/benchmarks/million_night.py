"""What a night costs when one row is new: a first run over ROWS short rows, then one more row, timed and counted.

    python -m tests.benchmarks.million_night [--rows 1000000]

The model is played by an engine that answers at once; input, planning, comparing, merging and every file are real.
Each night is a process of its own, so that its peak memory is its own. Prints one JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from bulkrun.request import Completion, Request
from tests.benchmarks.million_rows import InstantEngine, peak_rss_kib
from tests.launch.nights import Nights


class CountingEngine(InstantEngine):
    """Keeps the last few requests, which says how many there were when there were few."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def add_request(self, request: Request) -> None:
        self.seen.append(request.request_id)
        super().add_request(request)

    def _completion(self, request: Request) -> Completion:
        size = len(request.prompt_token_ids)
        return Completion(request.request_id, (97,), "stop", num_prompt_tokens=size, num_output_tokens=1)


def night(folder: str, name: str) -> None:
    """One submit; prints what it cost."""
    settings: dict[str, Any] = {"output__rows_per_file": None, "prompt__chat_template": "none"}
    nights = Nights(Path(folder), settings, make_engine=CountingEngine)
    began = time.monotonic()
    done = nights.submit()
    report = {"night": name, "rows": done.totals.rows, "parts": done.totals.parts, "generations": nights.ran}
    report |= {"seconds": round(time.monotonic() - began, 1), "peak_rss_mib": peak_rss_kib() // 1024}
    print(json.dumps({**report, "changes": done.changes}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "rows.jsonl").open("w") as file:
        for name, end in (("first", rows), ("one more row", rows + 1), ("nothing new", rows + 1)):
            start = 0 if name == "first" else rows
            if name != "nothing new":
                file.writelines(json.dumps({"id": f"r{n}", "text": f"text {n}"}) + "\n" for n in range(start, end))
                file.flush()
            child = processes.Process(target=night, args=(folder, name))
            child.start()
            child.join()


if __name__ == "__main__":
    main()
