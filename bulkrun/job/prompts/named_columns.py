"""The input's columns that a job names, for an input that has no rows and so no columns of its own."""

from __future__ import annotations

from collections.abc import Collection

from bulkrun.job.jobfile.prompt import PromptSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.detect import BATCH_COLUMNS, has_mapping, is_told_by
from bulkrun.job.prompts.templates import columns_of


def named_columns(spec: JobSpec, known: Collection[str] = ()) -> list[str]:
    """Every column that the job cannot do without, each once; `text` stands for a prompt that columns would tell, where
    none of the `known` ones does."""
    given, output = spec.input, spec.output
    names = [given.id, given.priority, given.adapter, *(given.columns or [])]
    names += [*output.partition_by, *spec.sampling.per_row.values()]
    is_told = has_mapping(spec.prompt) or is_told_by(spec, known)
    told_by = BATCH_COLUMNS if spec.prompt.score_lines else ("text",)
    names += [*_prompt_columns(spec.prompt), *(() if is_told else told_by)]
    return list(dict.fromkeys(name for name in names if name is not None))


def _prompt_columns(prompt: PromptSpec) -> list[str]:
    templates, columns = [prompt.template, prompt.text_pair, prompt.system], [prompt.column, prompt.token_ids]
    if isinstance(prompt.tools, str):
        columns.append(prompt.tools)
    if isinstance(prompt.messages, list):
        templates += [message.content for message in prompt.messages]
    else:
        columns.append(prompt.messages)
    columns += [name for source in templates if source is not None for name in columns_of(source)]
    return [name for name in columns if name is not None]
