"""`task: classify` and its section: what goes with which task, and where an error is said to be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bulkrun.errors import JobFileError
from bulkrun.job.jobfile.load import job_schema, load_job
from bulkrun.job.jobfile.reference import keys_below
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.prompts.detect import describe_prompt, detected_job
from bulkrun.job.prompts.named_columns import named_columns
from bulkrun.settings import ClassificationArgs

JOB = """\
name: labels
model: m
task: classify
input: {path: docs.parquet}
output: {path: out}
"""


def load(folder: Path, more: str = "", *overrides: str) -> JobSpec:
    (folder / "x.yaml").write_text(JOB + more)
    return load_job(folder / "x.yaml", overrides)


def test_a_job_that_classifies_needs_nothing_more(tmp_path: Path) -> None:
    spec = load(tmp_path)
    assert not spec.generates and spec.classification.to_args() == ClassificationArgs()
    full = load(tmp_path, "classification: {activation: sigmoid, labels: [bad, good]}\n")
    assert full.classification.to_args() == ClassificationArgs(activation="sigmoid")
    assert JobSpec.model_validate(full.model_dump(mode="json")) == full, "as the run's record has it"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("sampling: {max_tokens: 5}\n", "x.yaml:6:12: sampling.max_tokens: nothing is sampled with task: classify"),
        ("embedding: {pooling: cls}\n", "x.yaml:6:13: embedding.pooling: is for vectors, and this job makes labels"),
        ("prompt: {column: text, system: Be short}\n", "x.yaml:6:24: prompt.system: .* or write prompt.messages"),
        ("prompt: {column: a, chat_template: x}\n", "x.yaml:6:21: prompt.chat_template: .* or write prompt.messages"),
        ("prompt: {messages: chat, text_pair: b}\n", "x.yaml:6:26: prompt.text_pair: .* not with a conversation"),
        ("run: {row_timeout: 9}\n", "x.yaml:6:7: run.row_timeout: .* leave it out"),
        ("engine: {kv_cache_dtype: fp8}\n", "x.yaml:6:10: engine.kv_cache_dtype: .* no KV cache; leave it out"),
        ("classification: {activation: tanh}\n", 'x.yaml:6:18: .*"tanh" is not one of softmax, sigmoid, none'),
        ("prompt: {column: a, text_pair: ''}\n", "x.yaml:6:21: prompt.text_pair"),
        ("classification: {labels: []}\n", "x.yaml:6:18: classification.labels"),
    ],
)
def test_what_makes_no_sense_is_refused_where_it_stands(tmp_path: Path, more: str, said: str) -> None:
    with pytest.raises(JobFileError) as caught:
        load(tmp_path, more)
    [line] = caught.value.problems
    assert re.match(said, line.removeprefix(f"{tmp_path}/")), line


@pytest.mark.parametrize("task", ["generate", "embed"])
def test_the_section_is_of_no_other_task(tmp_path: Path, task: str) -> None:
    with pytest.raises(JobFileError, match=r"classification\.labels: is for labels, and .*write task: classify"):
        load(tmp_path, "classification: {labels: [a]}\n", f"task={task}")


@pytest.mark.parametrize(("task", "makes"), [("generate", "generates text"), ("embed", "makes vectors")])
def test_pairs_of_texts_are_of_no_other_task(tmp_path: Path, task: str, makes: str) -> None:
    said = rf"x.yaml:6:21: prompt\.text_pair: is for .* pairs of texts, and this job {makes}; write task: classify, or"
    with pytest.raises(JobFileError, match=said):
        load(tmp_path, "prompt: {column: a, text_pair: '{{ b }}'}\n", f"task={task}")
    spec = load(tmp_path, "prompt: {text_pair: '{{ b }}'}\n")
    assert spec.prompt.text_pair == "{{ b }}"
    assert detected_job(spec, ["text", "b"]).prompt.column == "text"
    assert describe_prompt(spec, ["text", "b"]) == "column 'text': text (detected), and prompt.text_pair"
    assert named_columns(spec) == ["b", "text"]


@pytest.mark.parametrize(
    ("key", "hint"),
    [("hypothesis_template", r"prompt\.text_pair"),
     ("function_to_apply", "classification.activation"), ("id2label", "classification.labels"),
     ("activation", "belongs to classification:")],
)  # fmt: skip
def test_names_of_other_tools_lead_to_those_here(tmp_path: Path, key: str, hint: str) -> None:
    with pytest.raises(JobFileError, match=hint):
        load(tmp_path, f"{key}: x\n")


def test_columns_tell_the_text_and_batch_lines_are_of_no_use(tmp_path: Path) -> None:
    spec = load(tmp_path)
    assert detected_job(spec, ["prompt", "text"]).prompt.column == "text"
    with pytest.raises(JobFileError, match=r"OpenAI batch\. With task: classify write prompt\.score_lines"):
        detected_job(spec, ["custom_id", "url", "body"])


def test_every_key_is_described() -> None:
    keys = keys_below(job_schema(), "classification")
    assert [key.key for key in keys] == ["classification", "classification.activation", "classification.labels"]
    assert all("Default" in key.description for key in keys[1:])
