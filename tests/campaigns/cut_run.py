"""A run that its time limit cuts again and again: how many tokens are computed twice?

    python -m tests.campaigns.cut_run [--cuts 10] [--rows 600] [--max-tokens 200]

Runs the same job (bundled model, long outputs) once unbroken and once with SIGUSR1, Slurm's early warning, at random
moments. Prints one JSON line: output tokens generated beyond those of the answers, and prompt tokens beyond the
unbroken run's (each start computes the prompts of what goes on mid-sequence, and shared prefixes, again).
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from bulkrun.job.store.events import read_events
from bulkrun.job.store.run_dir import RunDir

JOB = """\
name: cut
model: bundled:tiny
input: {{path: {input}, id: name}}
prompt: {{template: "Summarize this Python code in one sentence:\\n{{{{ source }}}}"}}
sampling: {{max_tokens: {max_tokens}, temperature: 1, ignore_eos: true}}
output: {{path: {output}, rows_per_file: 64}}
engine: {{device: cpu, dtype: float32, max_num_seqs: 32}}
"""


def write_job(folder: Path, name: str, max_tokens: int) -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(JOB.format(input=folder / "rows.jsonl", output=folder / name, max_tokens=max_tokens))
    return path


def start(job: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "bulkrun", "submit", str(job), "--quiet"])


def results(out: Path) -> dict[int, str]:
    tables = [pq.read_table(path, columns=["row", "response"]) for path in out.glob("part-*.parquet")]
    return {row["row"]: row["response"] for table in tables for row in table.to_pylist()}


def computed(out: Path) -> tuple[int, int]:
    """Prompt and output tokens that all attempts together computed, by the workers' last words."""
    ended = [event for event in read_events(RunDir(out)) if "output_tokens" in event]
    return sum(event["computed_prompt_tokens"] for event in ended), sum(
        event["computed_output_tokens"] for event in ended
    )


def cut_run(folder: Path, cuts: int, rows: int, max_tokens: int, seed: int) -> dict[str, object]:
    lines = [{"name": f"f{i}", "source": f"def add_{i}(a, b):\n    return a * {i} + b"} for i in range(rows)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = time.monotonic()
    assert start(write_job(folder, "unbroken", max_tokens)).wait() == 0
    whole_s = time.monotonic() - began

    rng, job, done = random.Random(seed), write_job(folder, "cut", max_tokens), 0
    while done < cuts:
        process, journal = start(job), folder / "cut/.bulkrun/journal"
        before = len(list(journal.glob("*.jsonl")))
        while process.poll() is None and len(list(journal.glob("*.jsonl"))) == before:
            time.sleep(0.05)  # until this attempt is at work
        time.sleep(rng.uniform(0.2, 0.8) * whole_s / cuts)
        process.send_signal(signal.SIGUSR1)
        if process.wait() != 75:
            break
        done += 1
    last = start(job).wait()
    assert last == 0, f"exit status {last}"
    assert results(folder / "cut") == results(folder / "unbroken")
    (prompt, output), (prompt_again, output_again) = computed(folder / "unbroken"), computed(folder / "cut")
    return {
        "cuts": done,
        "rows": rows,
        "output_tokens": output,
        "output_tokens_twice": output_again - output,
        "output_share": round((output_again - output) / output, 5),
        "prompt_tokens": prompt,
        "prompt_tokens_again": prompt_again - prompt,
        "unbroken_s": round(whole_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cuts", type=int, default=10)
    parser.add_argument("--rows", type=int, default=600)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(cut_run(Path(folder), args.cuts, args.rows, args.max_tokens, args.seed)))


if __name__ == "__main__":
    main()
