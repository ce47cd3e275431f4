"""A job without a run: checked, planned, or tried on its first rows. Writes no results."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any, NamedTuple

from bulkrun.data.batch import InputBatch
from bulkrun.data.remote import is_remote
from bulkrun.data.schema import output_schema, passthrough_schema
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.plan.partitions import Partitions
from bulkrun.job.plan.planner import PlanInput, dry_plan
from bulkrun.job.plan.priorities import Priorities
from bulkrun.job.plan.report import PlanReport
from bulkrun.job.plan.result_columns import extra_fields
from bulkrun.job.plan.rows import check_id_column, fit_prompt, id_texts
from bulkrun.job.prompts.builder import Prompt, PromptBuilder
from bulkrun.job.prompts.detect import describe_prompt, detected_job
from bulkrun.job.prompts.fit import fitter_of
from bulkrun.job.store.run_dir import check_place
from bulkrun.job.work.answers import Answer, AnswerReader
from bulkrun.job.work.shard_work import Generation, row_seed
from bulkrun.launch.engine import check_device, engine_factory
from bulkrun.launch.night_plan import plan_night
from bulkrun.launch.prepare import PreparedJob, prepare
from bulkrun.request import Completion, Request, RowError


class PreviewedRow(NamedTuple):
    """One row as it would go through the job."""

    row_id: str
    prompt: str | None
    response: str | None
    ended_by: str  # stop, length, or the error
    reasoning: str | None = None


def check_job(spec: JobSpec) -> dict[str, Any]:
    """Everything that can be checked without running: input, columns, prompt, model. Raises what `submit` would."""
    prepared = prepare(spec)
    check_place(prepared.run)
    if spec.run.executor == "local":
        check_device(spec.engine)
    with prepared.open_dataset() as dataset:
        PromptBuilder(prepared.spec, dataset.schema.names, prepared.tokenizer)
        id_column = detected_job(spec, dataset.schema.names).input.id
        check_id_column(id_column, dataset.schema)
        extra = extra_fields(prepared.spec)
        passthrough = passthrough_schema(dataset.schema, spec.input.columns, extra, id_column)
        Partitions(spec.output.partition_by, passthrough)
        Priorities(spec.input.priority, dataset.schema.names)
        declared = output_schema(passthrough, extra)
    return {
        "job": spec.name,
        "model": f"{spec.model} ({prepared.model.architecture}, up to {prepared.max_model_len:,} tokens)",
        "input files": len(prepared.files),
        "prompt": describe_prompt(spec, dataset.schema.names),
        "input columns": ", ".join(f"{field.name} {field.type}" for field in dataset.schema),
        "output columns": ", ".join(declared.names),
        "output": spec.output.path if is_remote(spec.output.path) else str(prepared.run.root),
    }


def plan_job(spec: JobSpec) -> tuple[PlanReport, dict[str, int] | None]:
    """Plan the whole input, and keep nothing of it but the numbers.

    For an incremental job with results: plan what `submit` would run, and count how the input differs from them.
    """
    prepared = prepare(spec)
    if spec.run.incremental and (night := plan_night(prepared)) is not None:
        changes, report = night
        return report, changes
    with prepared.open_dataset() as dataset:
        return dry_plan(prepared.spec, dataset, prepared.tokenizer, prepared.max_model_len), None


def preview_job(spec: JobSpec, num_rows: int) -> list[PreviewedRow]:
    """Run the first rows, one sample each."""
    prepared = prepare(spec)
    with prepared.open_dataset() as dataset:
        builder = PromptBuilder(prepared.spec, dataset.schema.names, prepared.tokenizer)
        used = PlanInput(prepared.spec, dataset, prepared.tokenizer, prepared.max_model_len).dataset
        batches = list(used.batches(limit=num_rows))
        id_column = detected_job(spec, dataset.schema.names).input.id
        fitter = fitter_of(prepared.spec, prepared.max_model_len)
    prompts = [fit_prompt(fitter, prompt) for batch in batches for prompt in builder.build(batch)]
    return _generate(prepared, _row_ids(batches, id_column), prompts)


def _row_ids(batches: list[InputBatch], column: str | None) -> list[str]:
    """As in the plan: the id column's value as text, the row's number where there is none."""
    if column is None:
        return [str(row) for row in range(sum(batch.rows.num_rows for batch in batches))]
    values = [value for batch in batches for value in id_texts(batch.rows.column(column), column)]
    return [str(row) if value is None else value for row, value in enumerate(values)]


def _generate(prepared: PreparedJob, row_ids: list[str], prompts: list[Prompt | RowError]) -> list[PreviewedRow]:
    engine = engine_factory(prepared)()
    requests = {
        index: _request(str(index), row_ids[index], prompt, prepared.spec)
        for index, prompt in enumerate(prompts)
        if isinstance(prompt, Prompt)
    }
    for request in requests.values():
        engine.add_request(request)
    done: dict[str, Completion] = {}
    while engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
    reader = AnswerReader(prepared.tokenizer.decode_batch, extra_fields(prepared.spec))
    return [
        PreviewedRow(row_id, None, None, f"{prompt.code}: {prompt.message}")
        if isinstance(prompt, RowError)
        else _shown(prepared, row_id, requests[index], done[str(index)], reader)
        for index, (row_id, prompt) in enumerate(zip(row_ids, prompts, strict=True))
    ]


def _request(request_id: str, row_id: str, prompt: Prompt, spec: JobSpec) -> Request:
    own = json.loads(prompt.sampling.overrides or "{}")
    seed = row_seed(own.get("seed", spec.sampling.seed), row_id, sample=0)
    sampling = replace(spec.sampling.to_params(own), timeout_s=spec.run.row_timeout)
    return Request(request_id, prompt.token_ids, sampling, seed)


def _shown(
    prepared: PreparedJob, row_id: str, request: Request, completion: Completion, reader: AnswerReader
) -> PreviewedRow:
    text = prepared.tokenizer.decode_batch([request.prompt_token_ids], skip_special_tokens=False)[0]
    [record] = reader.records([Answer(Generation(request, shard=0, rows=(0,), sample=0), completion)])
    ended = record.finish_reason if record.error_code is None else f"{record.error_code}: {record.error_message}"
    return PreviewedRow(row_id, text, record.response, ended, record.extra.get("reasoning"))
