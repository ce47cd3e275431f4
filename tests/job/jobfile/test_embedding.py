"""`task: embed` and its section: what goes with which task, and where an error is said to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_of, job_schema, load_job
from bulkrun.job.jobfile.reference import keys_below
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.settings import EmbeddingArgs

JOB = """\
name: embed
model: m
task: embed
input: {path: docs.parquet}
output: {path: out}
"""


def load(folder: Path, more: str = "", *overrides: str) -> JobSpec:
    (folder / "x.yaml").write_text(JOB + more)
    return load_job(folder / "x.yaml", overrides)


def problem(folder: Path, more: str, *overrides: str) -> str:
    with pytest.raises(JobFileError) as caught:
        load(folder, more, *overrides)
    [line] = caught.value.problems
    return line.removeprefix(f"{folder}/")


def test_a_job_that_embeds_needs_nothing_more(tmp_path: Path) -> None:
    spec = load(tmp_path)
    assert not spec.generates and spec.embedding.to_args() == EmbeddingArgs()
    assert spec.sampled.to_params().greedy, "equal texts run once"
    full = load(tmp_path, "embedding: {pooling: last, normalize: true, dimensions: 256, prompt_name: query}\n")
    assert full.embedding.to_args() == EmbeddingArgs(pooling="last", normalize=True, dimensions=256)
    assert JobSpec.model_validate(full.model_dump(mode="json")) == full, "as the run's record has it"


def test_a_job_that_generates_is_what_it_was() -> None:
    values = {"name": "a", "model": "m", "input": {"path": "x"}, "output": {"path": "o"}, "sampling": {"top_k": 3}}
    spec = job_of(values)
    assert spec.task == "generate" and spec.generates and spec.sampled is spec.sampling


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sampling: {max_tokens: 5}\n", "x.yaml:6:12: sampling.max_tokens: nothing is sampled with task: embed"),
        ("sampling:\n  n: 2\n", "x.yaml:7:3: sampling.n: nothing is sampled"),
        ("prompt: {messages: chat}\n", "x.yaml:6:10: prompt.messages: .* prompt.column"),
        ("prompt: {column: text, system: Be short}\n", "x.yaml:6:24: prompt.system: .* embedding.prompt"),
        ("prompt: {chat_template: t.jinja}\n", "x.yaml:6:10: prompt.chat_template: .* leave it out"),
        ("prompt: {chat_template_kwargs: {a: 1}}\n", "x.yaml:6:10: prompt.chat_template_kwargs: .* leave them out"),
        ("run: {max_tokens_per_row: 9}\n", "x.yaml:6:7: run.max_tokens_per_row: .* engine.max_model_len"),
        ("run: {row_timeout: 9}\n", "x.yaml:6:7: run.row_timeout: .* leave it out"),
        ("engine: {kv_cache_dtype: fp8}\n", "x.yaml:6:10: engine.kv_cache_dtype: .* no KV cache; leave it out"),
        ("engine: {batching: static}\n", "x.yaml:6:10: engine.batching: .* leave it out"),
        ("embedding: {prompt: a, prompt_name: b}\n", "x.yaml:6:24: embedding.prompt_name: .* keep one"),
        ("embedding: {dimensions: 0}\n", "x.yaml:6:13: embedding.dimensions: 0 is out of range: at least 1"),
        ("embedding: {pooling: max}\n", 'x.yaml:6:13: embedding.pooling: "max" is not one of cls, mean, last'),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(tmp_path: Path, more: str, said: str) -> None:
    line = problem(tmp_path, more)
    assert re.match(said, line), line


def test_a_task_is_named_where_a_job_that_generates_has_keys_of_vectors(tmp_path: Path) -> None:
    line = problem(tmp_path, "embedding: {normalize: false}\n", "task=generate")
    assert line.startswith("x.yaml:6:13: embedding.normalize: is for vectors") and "task: embed" in line
    assert "did you mean embed?" in problem(tmp_path, "", "task=embedding")


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("task_type", "task: embed"),
        ("runner", "task: embed"),
        ("truncate_dim", "embedding.dimensions"),
        ("normalize_embeddings", "embedding.normalize"),
        ("pooling_type", "embedding.pooling"),
        ("prompt_name", "belongs to embedding:"),
    ],
)
def test_names_of_other_tools_lead_to_those_here(tmp_path: Path, key: str, hint: str) -> None:
    assert hint in problem(tmp_path, f"{key}: x\n")


@pytest.mark.parametrize("more", ["prompt: {chat_template: none}\n", "sampling: {}\n", "embedding: {prompt: ''}\n"])
def test_what_such_a_job_means_anyway_may_be_said(tmp_path: Path, more: str) -> None:
    assert not load(tmp_path, more).generates


def test_every_key_is_described() -> None:
    keys = keys_below(job_schema(), "embedding")
    names = ["pooling", "normalize", "dimensions", "prompt_name", "prompt"]
    assert [key.key for key in keys] == ["embedding", *(f"embedding.{name}" for name in names)]
    assert all("Default" in key.description for key in keys[1:])
