"""A run as its user drives it, each command in a process of its own that may die; and all that can be seen of a run."""

from __future__ import annotations

import csv
import json
import os
import pickle
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq

from bulkrun.data.results.query import run_query
from bulkrun.errors import BulkrunError
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_record import read_record
from bulkrun.job.store.run_totals import read_totals
from bulkrun.job.views.export import export_run
from bulkrun.job.views.export_target import ExportOptions
from bulkrun.job.views.listing import find_runs
from bulkrun.job.views.row_errors import read_row_errors
from bulkrun.job.views.status import read_status
from bulkrun.job.views.verify import verify_run
from tests.campaigns.kill_update import Doom
from tests.campaigns.long_life.bucket import count_requests

EXPORTS = ("jsonl", "csv", "parquet", "openai")


@dataclass(frozen=True)
class Ended:
    """How a command ended: with a `value`, with an `error` (its class) or killed (neither)."""

    value: Any = None
    error: str | None = None
    message: str = ""
    killed: bool = False


@dataclass(frozen=True)
class Death:
    """SIGKILL, or SIGTERM, which drains, right before or after a durable operation on files, by requests, or `all`."""

    at: int
    before: bool
    signal: int = signal.SIGKILL
    counted: str = "files"

    def threaten(self) -> None:
        """From now on this process may die."""
        doom = Doom(self.at, before=self.before, number=self.signal)
        if self.counted != "requests":
            doom.count_files()
        if self.counted != "files":
            count_requests(doom)


def in_child(work: Callable[[], Any], death: Death | None = None) -> Ended:
    """Run it in a forked process: this one has no threads, and no command finds what another left in memory."""
    return _start(work, death)()


def in_children(one: Callable[[], Any], death: Death | None, other: Callable[[], Any]) -> tuple[Ended, Ended]:
    """Two at the same time."""
    ends = _start(one, death), _start(other, None)
    return ends[0](), ends[1]()


def _start(work: Callable[[], Any], death: Death | None) -> Callable[[], Ended]:
    """Fork; what is returned waits for the end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        if death is not None:
            death.threaten()
        with os.fdopen(writing, "wb") as stream:
            stream.write(pickle.dumps(_ended(work)))
        os._exit(0)
    os.close(writing)

    def end() -> Ended:
        with os.fdopen(reading, "rb") as stream:
            said = stream.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return pickle.loads(said) if code == 0 else Ended(killed=True, message=str(code))

    return end


def _ended(work: Callable[[], Any]) -> Ended:
    try:
        return Ended(work())
    except BulkrunError as error:
        return Ended(error=type(error).__name__, message=str(error))
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        return Ended(error=f"crash: {type(error).__name__}", message=str(error))


@dataclass
class Seen:
    """What a run looks like from outside."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    columns: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    verify: list[str] = field(default_factory=list)
    finished: bool = False
    totals: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)


def look(out: Path, exports: bool) -> Seen:
    """Read it in every way that there is; what disagrees is a problem."""
    run, seen = RunDir(out), Seen()
    parts = sorted(out.glob("**/*.parquet"))
    seen.rows = read_glob(out)
    schemas = {str(pq.read_schema(path).remove_metadata()) for path in parts}
    if len(schemas) > 1:
        seen.problems.append(f"{len(schemas)} schemas in one glob")
    seen.columns = {column.name: str(column.type) for column in pq.read_schema(parts[0])} if parts else {}
    seen.verify = verify_run(run).problems
    totals, status = read_totals(run), read_status(run)
    seen.finished, seen.totals = totals is not None, vars(totals) if totals else {}
    names = (
        "state",
        "rows_total",
        "rows_done",
        "error_rows",
        "message",
        "run_id",
        "completion_tokens",
        "duplicate_ids",
    )
    seen.status = {name: getattr(status, name) for name in names} | {"update": status.update is not None}
    seen.job = read_record(run).job
    seen.leftovers = leftovers(out)
    if not out.is_symlink() and [run.root for run in find_runs(out.parent) if run.root == out] != [out]:
        seen.problems.append("`list` does not find it")
    errors = Counter(row["error_code"] for row in seen.rows if row["error_code"])
    settled = seen.finished and not seen.status["update"]
    if settled and (counted := read_row_errors(run, examples=1).counts) != dict(errors):
        seen.problems.append(f"`errors` counts {counted}, the rows hold {dict(errors)}")
    if exports and settled and parts:
        seen.problems += _queried(out, seen.rows) + _exported(run, seen.rows)
    return seen


def read_glob(out: Path) -> list[dict[str, Any]]:
    """All rows, by DuckDB's glob alone."""
    parts = f"read_parquet('{out}/**/*.parquet', hive_types_autocast = false)"
    if not any(out.glob("**/*.parquet")):
        return []
    return duckdb.connect().sql(f"SELECT * FROM {parts}").to_arrow_table().to_pylist()


def leftovers(out: Path) -> list[str]:
    """Files that a command which has ended must not leave."""
    out = out.resolve()
    state = out / ".bulkrun"
    found = [path for path in out.rglob("*") if path.name.endswith((".tmp", ".staged"))]
    found += [
        path for name in ("tmp", "journal", "next", "flight") for path in (state / name).rglob("*") if path.is_file()
    ]
    found += [
        path
        for path in out.iterdir()
        if path.name not in ("_SUCCESS", ".bulkrun") and path.suffix != ".parquet" and "=" not in path.name
    ]
    found += [path for path in out.parent.iterdir() if path.name.startswith(".")]
    claims = [path for path in (state / "claims").glob("*") if not path.name.startswith("plan")]
    workers = list((state / "workers").glob("*"))
    return [str(path.relative_to(out.parent)) for path in {*found, *claims, *(workers if len(workers) > 12 else ())}]


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    nested = row.get("meta") or None
    meta = json.loads(nested) if isinstance(nested, str) else nested  # of CSV
    texts = (row["id"], row["tag"], row.get("text"), meta, row["response"], row["error_code"])
    return int(row["row"]), int(row["sample"]), *(str(text) if text not in (None, "") else None for text in texts)


def _queried(out: Path, rows: list[dict[str, Any]]) -> list[str]:
    found = run_query(out, "SELECT * FROM results").to_pylist()
    return [] if sorted(map(_key, found), key=str) == sorted(map(_key, rows), key=str) else ["`query` shows other rows"]


def _exported(run: RunDir, rows: list[dict[str, Any]]) -> list[str]:
    """Each format holds the rows of the glob, in input order."""
    want, problems = sorted(map(_key, rows), key=lambda key: key[:2]), list[str]()
    for name in EXPORTS:
        path = run.root.parent / f"export.{name}"
        report = export_run(run, ExportOptions(name, path, force=True), sys.stdout.buffer)
        if name == "openai":
            failed = {key[0] for key in want if key[-1]}
            good = {key[0] for key in want if not key[-1]}
            got: Any = (report.output_lines, report.error_lines)
            problems += [] if got == (len(good), len(failed)) else [f"openai lines {got}"]
            path.with_name("export.errors.openai").unlink(missing_ok=True)
        elif (got := [_key(row) for row in _READERS[name](path)]) != want:
            problems.append(f"export {name}: {len(got)} rows, {len(want)} in the parts, or others")
        path.unlink()
    return problems


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


_READERS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "jsonl": lambda path: [json.loads(line) for line in path.read_text().splitlines()],
    "csv": _read_csv,
    "parquet": lambda path: pq.read_table(path).to_pylist(),
}
