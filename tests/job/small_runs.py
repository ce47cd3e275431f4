"""Runs for tests: a plan written by hand with the real shard schema, and the answers an unbroken run must give."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bulkrun.data.storage.durable import publish_new, temporary, write_file, write_new_json
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.outputs.output_text import Decode
from bulkrun.job.plan.shard_file import ShardInfo, shard_bytes, shard_schema
from bulkrun.job.store.run_dir import RunDir
from bulkrun.job.store.run_gate import open_run, start_anew
from bulkrun.job.store.run_record import RunRecord, new_record
from bulkrun.job.store.workers import Worker
from bulkrun.job.work.attempt import Attempt
from bulkrun.job.work.pipeline import Pipeline
from bulkrun.job.work.runner import JobRunner, RunOutcome
from bulkrun.job.work.shard_work import row_seed
from bulkrun.request import Engine, Request
from tests.job.fake_engine import FakeEngine, decode, expected_logprob, expected_tokens

PASSTHROUGH = pa.schema([("doc", pa.string()), ("weight", pa.float64())])


@dataclass(frozen=True)
class Row:
    """An input row as the plan sees it."""

    row: int
    row_id: str
    token_ids: tuple[int, ...] | None
    overrides: dict[str, Any] | None = None
    error_code: str | None = None
    adapter: str = ""  # the same in all rows of a shard


def job(path: Path, *, n: int = 1, run: dict[str, Any] | None = None, **sampling: Any) -> JobSpec:
    given = {"max_tokens": 12, "temperature": 0.0, "n": n, "seed": 5, **sampling}
    return JobSpec.model_validate(
        {
            "name": "test",
            "model": "fake",
            "input": {"path": "rows.jsonl"},
            "prompt": {"column": "doc"},
            "sampling": given,
            "output": {"path": str(path)},
            "run": {"checkpoint_every": 0.05, "max_error_rate": 1.0, **(run or {})},
        }
    )


def make_rows(count: int, *, error_every: int = 7, duplicate_every: int = 5, seed: int = 3) -> list[Row]:
    """Rows with a bad one now and then, and prompts that several rows share. Row numbers have gaps in no shard."""
    rng = random.Random(seed)
    shared = tuple(rng.randrange(1000) for _ in range(4))
    rows = []
    for row in range(count):
        prompt: tuple[int, ...] | None = tuple(rng.randrange(1000) for _ in range(rng.randint(1, 9)))
        if duplicate_every and row % duplicate_every == 2:
            prompt = shared
        code = "bad_input" if error_every and row % error_every == 3 else None
        rows.append(Row(row, f"id-{row}", None if code else prompt, error_code=code))
    return rows


def write_plan(run: RunDir, rows: list[Row], shard_rows: int, *, complete: bool = True, samples: int = 1) -> None:
    """Publish shards of rows in input order, run order reversed, and the markers of the real planner."""
    shards = [rows[at : at + shard_rows] for at in range(0, len(rows), shard_rows)]
    for number, shard in enumerate(shards):
        write_shard(run, number, shard)
    errors = {"bad_input": sum(row.error_code is not None for row in rows)}
    if complete:
        write_new_json(run.window(0), {"rows": len(rows), "shards": len(shards), "errors": errors})
        totals = {"rows": len(rows), "shards": len(shards), "windows": 1, "samples": samples, "errors": errors}
        write_new_json(run.plan_complete, totals)


def write_shard(run: RunDir, number: int, rows: list[Row]) -> None:
    if run.shard(number).exists():
        return
    tokens = sum(len(row.token_ids or ()) for row in rows)
    info = ShardInfo(number, 0, len(rows), tokens, tokens + 12 * len(rows), adapter=rows[0].adapter)
    schema = shard_schema(PASSTHROUGH, info)
    table = pa.table(
        {
            "row": [row.row for row in rows],
            "order": list(reversed(range(len(rows)))),
            "row_id": [row.row_id for row in rows],
            "token_ids": [row.token_ids for row in rows],
            "overrides": [json.dumps(row.overrides) if row.overrides else None for row in rows],
            "error_code": [row.error_code for row in rows],
            "priority": [0 for _ in rows],
            "error_message": ["rows.jsonl:1: broken" if row.error_code else None for row in rows],
            "passthrough": [{"doc": f"text {row.row}", "weight": row.row / 2} for row in rows],
        },
        schema=schema,
    )
    tmp = temporary(run.shard(number))
    write_file(tmp, shard_bytes(table))
    publish_new(tmp, run.shard(number))


def enter(path: Path, spec: JobSpec, *, fresh: bool = False) -> tuple[RunDir, RunRecord]:
    run = RunDir(path)
    wanted = new_record(spec.model_dump(), input_facts={"bytes": 1}, model_facts={}, versions={"bulkrun": "0"})
    if fresh:
        start_anew(run, wanted)
    return run, open_run(run, wanted)


def start(
    path: Path,
    rows: list[Row],
    spec: JobSpec,
    *,
    shard_rows: int = 10,
    engine: FakeEngine | None = None,
    **options: Any,
) -> RunOutcome:
    """Submit as `bulkrun submit` would: enter the run, plan what is not planned, work until the end."""
    run, record = enter(path, spec)
    write_plan(run, rows, shard_rows, samples=spec.sampling.n)
    return make_runner(run, record, spec, engine or FakeEngine(), **options).run()


def make_runner(
    run: RunDir,
    record: RunRecord,
    spec: JobSpec,
    engine: Engine,
    *,
    decode: Decode = decode,
    rebuild_engine: Callable[[str], Engine] | None = None,
    worker: Worker | None = None,
    deadline: float | None = None,
    adapter: str = "",
    load_s: float = 0.0,
    **options: Any,
) -> JobRunner:
    """A worker that nobody stops and that goes on with the same engine after a failure, unless options say more."""
    attempt = Attempt(run, record, spec, worker or Worker.this_process())
    rebuild = rebuild_engine or (lambda adapter: engine)
    loaded = {"adapter": adapter, "load_s": load_s}
    pipeline = Pipeline(attempt, engine, decode, rebuild_engine=rebuild, deadline=deadline, **loaded)
    return JobRunner(attempt, pipeline, **{"should_stop": lambda: False, "heartbeat_s": 1.0, **options})


def oracle(rows: list[Row], spec: JobSpec) -> list[dict[str, Any]]:
    """The output rows of an unbroken run, from the fake model's rule alone."""
    answers = []
    for row in rows:
        generated = [_result(row, generation, spec) for generation in range(spec.sampling.generations)]
        if spec.sampling.best_of is not None:
            generated.sort(key=lambda result: -sum(map(expected_logprob, map(ord, result["response"] or ""))))
        for sample, result in enumerate(generated[: spec.sampling.n]):
            answers.append(
                {"doc": f"text {row.row}", "weight": row.row / 2, "row": row.row, "sample": sample, **result}
            )
    return answers


def _result(row: Row, sample: int, spec: JobSpec) -> dict[str, Any]:
    if row.token_ids is None:
        return {"response": None, "finish_reason": "error", "error_code": row.error_code}
    overrides = dict(row.overrides or {})
    seed = row_seed(overrides.pop("seed", spec.sampling.seed), row.row_id, sample)
    request = Request("", row.token_ids, spec.sampling.to_params(overrides), seed)
    tokens = expected_tokens(request)
    reason = "length" if len(tokens) == request.sampling.max_tokens else "stop"
    return {"response": decode([tokens])[0], "finish_reason": reason, "error_code": None}


def results(path: Path) -> list[dict[str, Any]]:
    """All output rows by a plain read of the parts, in part order; columns that the oracle knows."""
    rows: list[dict[str, Any]] = []
    for part in sorted(path.glob("*.parquet")):
        rows += pq.read_table(part, page_checksum_verification=True).to_pylist()
    known = ("doc", "weight", "row", "sample", "response", "finish_reason", "error_code")
    return [{name: row[name] for name in known} for row in rows]
