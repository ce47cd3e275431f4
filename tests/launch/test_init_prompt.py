"""What `bulkrun init` writes for vectors and labels, and for columns that are named: jobs that run on those texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import JobFileError, UsageError
from bulkrun.job.jobfile.load import load_job
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.launch.init_job import write_job
from bulkrun.launch.init_prompt import Wanted
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.runs.preview import check_job

TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day"}]
ROW: dict[str, Any] = {
    "id": 7,
    "title": "a title",
    "body": "a body",
    "n": 3,
    "talk": TALK,
    "a \u2028b\x7f": "odd",
    "label": "gold",
    "Embedding": [1.0],
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return over(ROW)


def over(row: dict[str, Any]) -> str:
    Path("data.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return "data.jsonl"


def job_of(source: str, *overrides: str, **wanted: Any) -> Any:
    """The job that is written, as it loads."""
    job = Path("job.yaml")
    job.unlink(missing_ok=True)
    write_job(source, job, Wanted(**wanted))
    return load_job(job, overrides)


def text_of(spec: Any) -> str:
    """The first row's text, as the model reads it."""
    prepared = prepare(spec)
    with prepared.open_dataset() as dataset:
        builder = PromptBuilder(prepared.spec, dataset.schema.names, prepared.tokenizer)
        [prompt] = builder.build(next(dataset.batches()))
    assert isinstance(prompt, Prompt), prompt
    return prepared.tokenizer.decode_batch([list(prompt.token_ids)])[0]


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        ((), "a title"),
        (("body",), "a body"),
        (("body", "title"), "a body\na title"),
        (("n",), "3"),
        (("a \u2028b\x7f",), "odd"),
        (("talk",), "Hello\nGood day"),
    ],
)
def test_a_job_of_vectors_runs_as_it_is(source: str, columns: tuple[str, ...], text: str) -> None:
    spec = job_of(source, task="embed", columns=columns)
    assert (spec.task, spec.embedding.pooling, spec.run.on_too_long) == ("embed", "mean", "truncate_right")
    assert check_job(spec)["vectors"].startswith("256 numbers")
    assert text_of(spec) == text


def test_another_model_says_itself_how_it_makes_vectors(source: str) -> None:
    spec = job_of(source, task="embed", model="BAAI/bge-m3")
    assert (spec.model, spec.embedding.pooling) == ("BAAI/bge-m3", None)


def test_a_job_of_labels_lacks_nothing_but_its_model(source: str) -> None:
    with pytest.raises(JobFileError, match=r"^job\.yaml:7:1: model: has no value; text is wanted$"):
        job_of(source, task="classify")
    row = over({"id": 7, "title": "a title", "body": "a body"})
    spec = job_of(row, "model=somewhere", task="classify")
    assert (spec.task, spec.prompt.column, spec.prompt.text_pair) == ("classify", "title", None)
    assert job_of(row, task="classify", model="somewhere") == spec


def test_two_columns_are_a_pair_for_a_model_that_reads_two(source: str) -> None:
    spec = job_of(source, task="classify", columns=("title", "a \u2028b\x7f"), model="somewhere")
    assert (spec.prompt.column, spec.prompt.text_pair) == ("title", '{{ row["a \\u2028b\\u007f"] }}')
    text = Path("job.yaml").read_text(encoding="utf-8")
    job_of(source, task="classify", columns=("title",), model="somewhere")
    proposed = Path("job.yaml").read_text(encoding="utf-8").replace("  # text_pair", "  text_pair")
    Path("job.yaml").write_text(proposed, encoding="utf-8")
    assert "# text_pair" not in text and load_job(Path("job.yaml")).prompt.text_pair == "{{ body }}"


def test_a_conversation_is_judged_with_its_answer(source: str) -> None:
    assert job_of(source, task="classify", columns=("talk",), model="m").prompt.messages == "talk"
    assert job_of(over({"n": 1, "source": "web", "chat": TALK}), task="classify", model="m").prompt.messages == "chat"
    assert job_of(over({"text": "a", "chat": TALK}), task="classify", model="m").prompt.column == "text"


def test_sharegpts_conversations_are_conversations(source: str) -> None:
    talk = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
    chats = over({"id": 1, "conversations": talk, "system": "s"})
    assert job_of(chats).prompt.messages == "conversations"
    assert job_of(chats, task="classify", model="m").prompt.messages == "conversations"
    assert "Hi\nYes" in text_of(job_of(chats, columns=("system", "conversations")))


@pytest.mark.parametrize(
    ("columns", "text"), [(("body",), "sentence:\na body"), (("body", "title"), "sentence:\na body\na title")]
)
def test_columns_that_are_named_are_those_of_the_prompt(source: str, columns: tuple[str, ...], text: str) -> None:
    assert text in text_of(job_of(source, columns=columns))
    assert job_of(source, columns=("talk",)).prompt.messages == "talk"


def test_the_columns_of_a_tasks_results_are_not_passed_through_unless_renamed(source: str) -> None:
    passed = {task: job_of(source, task=task, model="m").input.columns for task in ("generate", "embed", "classify")}
    assert passed["generate"] is None
    assert passed["classify"] == [name for name in ROW if name != "label"]
    assert passed["embed"] == [name for name in ROW if name != "Embedding"]
    job_of(source, task="embed")
    lines = Path("job.yaml").read_text(encoding="utf-8").replace("# sql:", "sql:").splitlines()
    kept = "\n".join(line for line in lines if not line.startswith("  columns:"))
    Path("job.yaml").write_text(kept, encoding="utf-8")
    assert "input_Embedding" in check_job(load_job(Path("job.yaml")))["output columns"]


def test_lines_of_openais_embeddings_bring_their_texts(source: str) -> None:
    batch = over({"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": {"input": "Hello"}})
    assert text_of(job_of(batch, task="embed")) == "Hello"
    assert "# prompt: {text_lists: true}" in Path("job.yaml").read_text(encoding="utf-8")


def test_a_column_of_lists_of_texts_has_a_vector_of_each(source: str) -> None:
    chunks = over({"doc": "a", "chunks": ["Hello", "there"]})
    prompt = job_of(chunks, task="embed", columns=("chunks",)).prompt
    assert (prompt.column, prompt.text_lists) == ("chunks", True)


def test_lines_of_scores_bring_their_pairs_to_a_model_that_is_named(source: str) -> None:
    batch = over({"custom_id": "a", "method": "POST", "url": "/v1/score", "body": {"text_1": "q", "text_2": "d"}})
    with pytest.raises(JobFileError, match="model"):
        job_of(batch, task="classify")
    assert "model:  # TO FILL IN: a reranker" in Path("job.yaml").read_text(encoding="utf-8")
    spec = job_of(batch, task="classify", model="somewhere")
    assert (spec.prompt.score_lines, spec.prompt.column, spec.run.on_too_long) == (True, None, "truncate_right")
    assert job_of(batch, task="classify", columns=("custom_id",), model="m").prompt.column == "custom_id"


@pytest.mark.parametrize(
    ("task", "columns", "said"),
    [
        ("embed", ("titel",), "--column: the input has no column 'titel'; did you mean 'title'?"),
        ("classify", ("id", "title", "body"), "--column: 3 of them; --task classify takes one, or two for a model of"),
    ],
)
def test_columns_that_cannot_be_are_named(source: str, task: str, columns: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        job_of(source, task=task, columns=columns)
    assert str(refused.value).startswith(said) and not Path("job.yaml").exists()
