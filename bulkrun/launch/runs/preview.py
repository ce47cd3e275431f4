"""A job without a run: checked, planned, or tried on its first rows. Writes no results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from bulkrun.data.results.schema import EMBEDDING, EMBEDDINGS, SCORES, output_schema
from bulkrun.data.storage.remote import is_remote
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.outputs.tool_calls import with_ids
from bulkrun.job.plan.plan_input import PlanInput, PlanPoint
from bulkrun.job.plan.planner import dry_plan
from bulkrun.job.plan.report import PlanReport
from bulkrun.job.plan.result_columns import TOOL_CALLS, result_fields
from bulkrun.job.plan.row_sample import RowSample
from bulkrun.job.prompts.own_values import own_values
from bulkrun.job.store.places import check_place
from bulkrun.job.store.run_gate import refuse_foreign_files
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.job.work.shard_work import Generation, row_sampling, row_seed
from bulkrun.job.work.vectors import VectorReader, reader_of, vector_of, vectors_of
from bulkrun.launch.engine import check_device, engine_factory
from bulkrun.launch.preparation.prepare import PreparedJob, prepare
from bulkrun.launch.preparation.tool_calling import warn_of_unoffered_tools
from bulkrun.launch.processes.garbage import release_garbage
from bulkrun.launch.runs.memory_needs import MemoryNeeds
from bulkrun.launch.runs.night_plan import plan_night
from bulkrun.launch.runs.probe import SAMPLE_ROWS, Probe, probe_job
from bulkrun.request import Completion, Request


class PreviewedRow(NamedTuple):
    """One row as it would go through the job."""

    row_id: str
    prompt: str | None
    response: str | None
    ended_by: str  # stop, length, or the error
    reasoning: str | None = None
    tool_calls: list[dict[str, str]] | None = None
    embedding: list[float] | None = None
    embeddings: list[list[float]] | None = None
    label: str | None = None
    scores: dict[str, float] | None = None  # by label


def check_job(spec: JobSpec) -> dict[str, Any]:
    """Everything that can be checked without running: input, columns, prompt, model. Raises what `submit` would."""
    prepared = prepare(spec)
    source = check_prepared(prepared)
    prepared.record(None)  # a run begins with one, which looks at the model's weights
    declared = output_schema(source.passthrough, result_fields(prepared.spec))
    return {
        "job": spec.name,
        "model": f"{spec.model} ({prepared.model.architecture}, up to {prepared.max_model_len:,} tokens)",
        **({} if spec.engine.adapter is None else {"adapter": spec.engine.adapter}),
        **({"adapters": ", ".join(spec.engine.adapters)} if spec.engine.adapters else {}),
        **_made_of_texts(prepared.spec),
        "input files": len(prepared.files),
        "prompt": source.prompt,
        "input columns": ", ".join(f"{field.name} {field.type}" for field in source.input_schema),
        "output columns": ", ".join(declared.names),
        "output": spec.output.path if is_remote(spec.output.path) else str(prepared.run.root),
    }


def _made_of_texts(spec: JobSpec) -> dict[str, str]:
    """What a prepared job that generates nothing makes of its rows."""
    if spec.task == "classify":
        return {"labels": f"{', '.join(spec.classification.labels or ())}; activation {spec.classification.activation}"}
    if spec.task == "generate":
        return {}
    made = spec.embedding
    normalized = "normalized" if made.normalize else "not normalized"
    before = f", after {made.prompt!r}" if made.prompt else ""
    return {"vectors": f"{made.dimensions} numbers, pooling {made.pooling}, {normalized}{before}"}


def check_prepared(prepared: PreparedJob, *, anew: bool = False) -> PlanInput:
    """The checks beyond those of `prepare`; `anew`: for a run in place of the one that is there. Its results then say
    nothing about the input's columns.
    """
    run, spec = prepared.run, prepared.spec
    check_place(run)
    if not (anew or run.run_json.exists()):
        refuse_foreign_files(run)
    if spec.run.executor == "local":
        check_device(spec.engine)
    reading = replace(prepared, spec=spec.with_keys(run={"incremental": False})) if anew else prepared
    with reading.open_dataset() as dataset:
        warn_of_unoffered_tools(spec, dataset.schema.names)
        return PlanInput(spec, dataset, prepared.tokenizer, prepared.max_model_len)


class Foreseen(NamedTuple):
    """A plan's numbers; `changes` counts how the input differs from an incremental job's results, None without any;
    `probe` says how long the plan takes, None where none was asked for; `memory` what it asks of a device."""

    report: PlanReport
    changes: dict[str, int] | None
    probe: Probe | None
    memory: MemoryNeeds


def plan_job(spec: JobSpec, probe_s: float | None = None) -> Foreseen:
    """Plan the whole input, and keep nothing of it but the numbers.

    For an incremental job with results: plan what `submit` would run. With `probe_s` some of its rows run for about so
    many seconds.
    """
    prepared, sample = prepare(spec), RowSample(SAMPLE_ROWS)
    keep = sample.add if probe_s is not None else lambda rows: None
    changes = None
    if spec.run.incremental and (night := plan_night(prepared, keep)) is not None:
        changes, report = night
    else:
        with prepared.open_dataset() as dataset:
            report = dry_plan(prepared.spec, dataset, prepared.tokenizer, prepared.max_model_len, keep)
    probed = None if probe_s is None else probe_job(prepared, report.counters, sample, probe_s)
    return Foreseen(report, changes, probed, MemoryNeeds.of(prepared, report.counters))


def preview_job(spec: JobSpec, num_rows: int) -> list[PreviewedRow]:
    """Run the first rows, one sample each."""
    prepared = prepare(spec)
    rows = _planned_rows(prepared, num_rows)
    able = [row for row in rows if row["error_code"] is None]
    requests = {row["row"]: _request(row, prepared.spec) for row in able}
    done = dict[str, Completion]()
    for adapter, numbers in _by_adapter(able).items():
        done |= _generate(prepared, adapter, [requests[number] for number in numbers])
    reader = reader_of(prepared.tokenizer.decode_batch, result_fields(prepared.spec))
    return [
        _shown(prepared, row["row_id"], requests[row["row"]], done[str(row["row"])], reader)
        if row["row"] in requests
        else PreviewedRow(row["row_id"], None, None, f"{row['error_code']}: {row['error_message']}")
        for row in rows
    ]


def _planned_rows(prepared: PreparedJob, num_rows: int) -> list[dict[str, Any]]:
    """The first rows of the input as a plan makes them: the columns of a shard."""
    num_rows = min(num_rows, prepared.spec.run.limit or num_rows)
    spec = prepared.spec.with_keys(run={"limit": num_rows, "window_rows": num_rows})
    rows: list[dict[str, Any]] = []
    with prepared.open_dataset() as dataset:
        source = PlanInput(spec, dataset, prepared.tokenizer, prepared.max_model_len)
        source.read_window(PlanPoint(), lambda batch: rows.extend(batch.drop_columns(["passthrough"]).to_pylist()))
    return rows


def _request(row: Mapping[str, Any], spec: JobSpec) -> Request:
    sampling, job_seed = row_sampling(spec.sampled, spec.run.row_timeout, row["overrides"])
    seed, parts = row_seed(job_seed, row["row_id"], sample=0), own_values(row["overrides"]).parts
    return Request(str(row["row"]), row["token_ids"], sampling, seed, parts=parts)


def _by_adapter(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[int]]:
    numbers: dict[str, list[int]] = {}
    for row in rows:
        numbers.setdefault(own_values(row["overrides"]).adapter, []).append(row["row"])
    return numbers


def _generate(prepared: PreparedJob, adapter: str, requests: Iterable[Request]) -> dict[str, Completion]:
    release_garbage()  # the engine with the adapter before: a GPU has no room for two
    engine = engine_factory(prepared)(adapter)
    for request in requests:
        engine.add_request(request)
    done: dict[str, Completion] = {}
    while engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def _parts_of(request: Request) -> list[Sequence[int]]:
    """The token ids of each text, or pair of texts, of a row."""
    ends = [*accumulate(request.parts)] or [len(request.prompt_token_ids)]
    return [request.prompt_token_ids[start:end] for start, end in pairwise([0, *ends])]


def _names(spec: JobSpec, count: int) -> Sequence[str]:
    """What the scores of a row are called: its labels, or the pairs of a line."""
    pairs = [f"pair {number}" for number in range(count)]
    return pairs if spec.prompt.score_lines else spec.classification.labels or ()


def _shown(
    prepared: PreparedJob,
    row_id: str,
    request: Request,
    completion: Completion,
    reader: AnswerReader | VectorReader,
) -> PreviewedRow:
    text = "\n".join(prepared.tokenizer.decode_batch(_parts_of(request), skip_special_tokens=False))
    [record] = reader.records([Answer(Generation(request, shard=0, rows=(0,), sample=0), completion)])
    ended = record.finish_reason if record.error_code is None else f"{record.error_code}: {record.error_message}"
    numbers = {name: vector_of(record.extra[name]).tolist() for name in (EMBEDDING, SCORES) if name in record.extra}
    if EMBEDDINGS in record.extra:
        numbers[EMBEDDINGS] = vectors_of(record.extra[EMBEDDINGS]).tolist()
    if SCORES in numbers:
        numbers[SCORES] = dict(zip(_names(prepared.spec, len(numbers[SCORES])), numbers[SCORES], strict=True))
    said = {name: record.extra.get(name) for name in ("reasoning", "label")}
    if (calls := record.extra.get(TOOL_CALLS)) is not None:
        said[TOOL_CALLS] = with_ids(calls, row_id, sample=0)
    return PreviewedRow(row_id, text, record.response, ended, **said, **numbers)
