"""A job without a run: checked, planned, or tried on its first rows. Writes no results."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from bulkrun.data.batch import InputBatch
from bulkrun.data.schema import output_schema, passthrough_schema
from bulkrun.job.jobfile.spec import JobSpec, SamplingSpec
from bulkrun.job.plan.planner import dry_plan
from bulkrun.job.plan.report import PlanReport
from bulkrun.job.plan.rows import id_texts
from bulkrun.job.prompts.builder import Prompt, PromptBuilder
from bulkrun.job.prompts.detect import describe_prompt, detected_job
from bulkrun.job.work.answers import answer_texts
from bulkrun.job.work.result_columns import extra_fields
from bulkrun.job.work.shard_work import row_seed
from bulkrun.launch.engine import engine_factory
from bulkrun.launch.night_plan import plan_night
from bulkrun.launch.prepare import PreparedJob, prepare
from bulkrun.request import Completion, Request, RowError


class PreviewedRow(NamedTuple):
    """One row as it would go through the job."""

    row_id: str
    prompt: str | None
    response: str | None
    ended_by: str  # stop, length, or the error


def check_job(spec: JobSpec) -> dict[str, Any]:
    """Everything that can be checked without running: input, columns, prompt, model. Raises what `submit` would."""
    prepared = prepare(spec)
    with prepared.open_dataset() as dataset:
        PromptBuilder(prepared.spec, dataset.schema.names, prepared.tokenizer)
        extra = extra_fields(prepared.spec)
        declared = output_schema(passthrough_schema(dataset.schema, spec.input.columns, extra), extra)
    return {
        "job": spec.name,
        "model": f"{spec.model} ({prepared.model.architecture}, up to {prepared.max_model_len:,} tokens)",
        "input files": len(prepared.files),
        "prompt": describe_prompt(spec, dataset.schema.names),
        "input columns": ", ".join(f"{field.name} {field.type}" for field in dataset.schema),
        "output columns": ", ".join(declared.names),
        "output": spec.output.path,
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
        batches = list(dataset.batches(limit=num_rows))
    prompts = [prompt for batch in batches for prompt in builder.build(batch)]
    id_column = detected_job(spec, dataset.schema.names).input.id
    return _generate(prepared, _row_ids(batches, id_column), prompts)


def _row_ids(batches: list[InputBatch], column: str | None) -> list[str]:
    """As in the plan: the id column's value as text, the row's number where there is none."""
    if column is None:
        return [str(row) for row in range(sum(batch.rows.num_rows for batch in batches))]
    values = [value for batch in batches for value in id_texts(batch.rows.column(column), column)]
    return [str(row) if value is None else value for row, value in enumerate(values)]


def _generate(prepared: PreparedJob, row_ids: list[str], prompts: list[Prompt | RowError]) -> list[PreviewedRow]:
    engine = engine_factory(prepared)()
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, Prompt):
            engine.add_request(_request(str(index), row_ids[index], prompt, prepared.spec.sampling))
    done: dict[str, Completion] = {}
    while engine.has_unfinished():
        done |= {completion.request_id: completion for completion in engine.step()}
    pairs = zip(row_ids, prompts, strict=True)
    return [_shown(prepared, *pair, done.get(str(index))) for index, pair in enumerate(pairs)]


def _request(request_id: str, row_id: str, prompt: Prompt, sampling: SamplingSpec) -> Request:
    own = json.loads(prompt.sampling.overrides or "{}")
    seed = row_seed(own.get("seed", sampling.seed), row_id, sample=0)
    return Request(request_id, prompt.token_ids, sampling.to_params(own), seed)


def _shown(
    prepared: PreparedJob, row_id: str, prompt: Prompt | RowError, completion: Completion | None
) -> PreviewedRow:
    if isinstance(prompt, RowError):
        return PreviewedRow(row_id, None, None, f"{prompt.code}: {prompt.message}")
    assert completion is not None, "every request that was added has ended"
    text = prepared.tokenizer.decode_batch([prompt.token_ids], skip_special_tokens=False)[0]
    if completion.error:
        return PreviewedRow(row_id, text, None, ": ".join(completion.error))
    response = answer_texts(prepared.tokenizer.decode_batch, [completion])[0]
    return PreviewedRow(row_id, text, response, completion.finish_reason)
