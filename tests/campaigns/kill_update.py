"""Kill campaign of changes to a finished run: nights and retries die with -9 at any durable operation and go on.

    python -m tests.campaigns.kill_update --kills 300 [--rows 60] [--seed 0]

Each round changes the input (or retries what failed) and runs the same command in forked processes, each of which kills
itself right before or right after a durable operation (fsync, rename, link, unlink) further on, until one survives. The
engine is the tests' fake one. Meanwhile another process reads `OUT/*.parquet` by a plain glob, with DuckDB and with
pyarrow in turn, and must see every id once. DuckDB opens a file a second time for its data, and fails where the file
was replaced after its footer was read: such a read is counted, and must succeed when it is repeated. In the end of each
round the results must be those of one run over the last input. Every third round the input changes once more between
two kills. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.views.verify import verify_run
from bulkrun.request import Request
from tests.launch.nights import Nights

ROOT = Path(__file__).resolve().parents[2]
_OPERATIONS = ("fsync", "replace", "rename", "link", "unlink", "rmdir")

READER = """
import sys, time, duckdb, pyarrow.parquet as pq
from pathlib import Path
out, log, reads, repeated = Path(sys.argv[1]), Path(sys.argv[2]), 0, 0

def read():
    if reads % 2:
        return duckdb.connect().execute(f"SELECT id, row FROM '{out}/*.parquet'").fetchall()
    paths = sorted(out.glob("*.parquet"))
    return [(row["id"], row["row"]) for path in paths for row in pq.ParquetFile(path).read().to_pylist()]

def must_be_there():
    try:
        return (out.parent / "must").read_text().split()
    except FileNotFoundError:  # at any moment: a round ended
        return []

while not (out.parent / "stop").exists():
    if not list(out.glob("*.parquet")):
        continue
    must = must_be_there()
    reads += 1
    for attempt in range(3):
        try:
            rows = read()
            break
        except Exception as error:
            repeated += 1
            if attempt == 2:
                log.write_text(f"read {reads} failed three times: {type(error).__name__}: {error}")
    ids = [row[0] for row in rows]
    if len(set(ids)) < len(ids) or len({row[1] for row in rows}) < len(rows):
        log.write_text(f"read {reads}: {len(ids)} rows, {len(set(ids))} ids")
    if gone := set(must) & set(must_be_there()) - set(ids):
        log.write_text(f"read {reads}: gone: {sorted(gone)[:5]}")
    (out.parent / "reads").write_text(f"{reads} {repeated}")
    time.sleep(0.01)
"""


def in_child(work: Callable[[], object]) -> int:
    """Run it in a forked process; its wait status as an exit code, negative for a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException as error:
            sys.stderr.write(f"{type(error).__name__}: {error}\n")
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Doom:
    """A signal to this process right before or right after its durable operation number `at`; SIGKILL is kill -9."""

    def __init__(self, at: int, *, before: bool, number: int = signal.SIGKILL) -> None:
        self._at, self._before, self._number = at, before, number
        self._count = 0

    @contextmanager
    def operation(self) -> Iterator[None]:
        """The body is one of those that are counted."""
        self._count += 1
        now = self._count == self._at
        if now and self._before:
            os.kill(os.getpid(), self._number)
        yield
        if now and not self._before:
            os.kill(os.getpid(), self._number)

    def count_files(self) -> None:
        """Count what makes files durable, from now on."""
        for name in _OPERATIONS:
            mock.patch.object(os, name, self._counted(getattr(os, name))).start()

    def _counted(self, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.operation():
                return operation(*arguments, **options)

        return call


def dying(work: Callable[[], object], at: int, *, before: bool) -> Callable[[], object]:
    """`work`, with kill -9 right before or after its durable operation number `at`."""

    def run() -> object:
        Doom(at, before=before).count_files()
        return work()

    return run


class Campaign:
    """One run directory and what its input says now."""

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self._rng = random.Random(options.seed)
        self._options = options
        settings = {"run__on_vanished": "drop", "output__rows_per_file": 7}
        self.nights = Nights(folder, settings)
        self.texts = {f"r{number}": 0 for number in range(options.rows)}
        self.kills = self.rounds = self.retries = 0

    def write(self) -> None:
        names = self._rng.sample(sorted(self.texts), len(self.texts))
        self.nights.write([{"id": name, "text": f"v{self.texts[name]}"} for name in names])

    def change_input(self) -> None:
        """Some rows edited, some new, some gone; in another order."""
        for name in self._rng.sample(sorted(self.texts), 6):
            self.texts[name] += 1
        for name in self._rng.sample(sorted(self.texts), 2):
            del self.texts[name]
        self.texts |= {f"n{self.rounds}-{number}-{self.kills}": 0 for number in range(self._rng.randint(0, 9))}
        self.write()

    def expect_present(self) -> None:
        """Tell the reader which ids must be there at every moment from now on."""
        there = set(self.texts) & self._there
        whole = self.nights.folder / "must.tmp"
        whole.write_text(" ".join(there))
        whole.replace(self.nights.folder / "must")

    _there: frozenset[str] = frozenset()

    def round(self) -> None:
        retry = self.rounds % 3 == 1
        (self.nights.folder / "must").unlink(missing_ok=True)
        if retry:
            self._fail_some()
            self.retries += 1
        else:
            self.change_input()
        self.expect_present()
        work = self.nights.retry if retry else self.nights.submit
        while self._kill_once(work):
            if self.rounds % 3 == 2 and self._rng.random() < 0.2:
                self.change_input()
                self.expect_present()
        assert in_child(self.check) == 0, "the results are not those of one run over the last input"
        self._there = frozenset(self.texts)
        self.rounds += 1

    def _fail_some(self) -> None:
        """A night that edits rows, three of which fail; the retry of these is what is killed."""
        for name in self._rng.sample(sorted(self.texts), 6):
            self.texts[name] += 1
        self.write()
        failed = [f"{number}:0" for number in self._rng.sample(range(6), 3)]
        self.nights.refuse = lambda request: request.request_id in failed
        assert in_child(self.nights.submit) == 0
        self.nights.refuse = _never

    def _kill_once(self, work: Callable[[], object]) -> bool:
        """Whether the command was killed before its end."""
        at = 1 + int(self._rng.expovariate(1 / 60)) if self._rng.random() < 0.7 else self._rng.randint(1, 250)
        code = in_child(dying(work, at, before=self._rng.random() < 0.5))
        assert code in (0, -signal.SIGKILL), f"exit code {code}"
        self.kills += code != 0
        return code != 0

    def check(self) -> None:
        report = verify_run(RunDir(self.nights.out))
        assert report.ok, report.problems
        answers = {name: row["response"] for name, row in self.nights.results().items()}
        assert answers == {name: self.nights.expected(name, f"v{text}") for name, text in self.texts.items()}

    def run(self) -> dict[str, Any]:
        """Rounds until the kills are used up."""
        self.write()
        assert in_child(self.nights.submit) == 0
        self._there = frozenset(self.texts)
        folder = self.nights.folder
        command = [sys.executable, "-c", READER, str(self.nights.out), str(folder / "wrong")]
        reader = subprocess.Popen(command, cwd=ROOT)
        try:
            while self.kills < self._options.kills:
                self.round()
        finally:
            (folder / "stop").touch()
            assert reader.wait(60) == 0, "the reader failed"
        wrong = (folder / "wrong").read_text() if (folder / "wrong").exists() else None
        assert wrong is None, wrong
        reads, repeated = map(int, (folder / "reads").read_text().split())
        return {
            "kills": self.kills,
            "rounds": self.rounds,
            "retries": self.retries,
            "reads": reads,
            "repeated_reads": repeated,
            "rows": len(self.texts),
        }


def _never(request: Request) -> bool:
    return False


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--rows", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(Campaign(Path(scratch), parse()).run()))
