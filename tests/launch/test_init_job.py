"""Job files that `bulkrun init` writes: they load, and their prompts are those of the input's columns."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulkrun.errors import InputError, JobFileError, UsageError
from bulkrun.job.jobfile.load import load_job
from bulkrun.job.prompts.builder import PromptBuilder
from bulkrun.job.prompts.encoder import Prompt
from bulkrun.launch.init_job import write_job
from bulkrun.launch.init_prompt import Wanted
from bulkrun.launch.preparation.prepare import prepare
from bulkrun.launch.runs.preview import check_job
from tests.full_disk import file_size_limit

ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"id": 7, "n": 1, "text": "a text"}],
    "any text": [{"n": 1, "title": "a title"}],
    "no name for Jinja": [{"first name": "Ada", "n": 2}],
    "numbers alone": [{"n": 3, "m": 4}],
    "prompt": [{"prompt": "Say hello."}],
    "messages": [{"messages": [{"role": "user", "content": "Hello"}]}],
    "messages as text": [{"prompt": "no", "messages": '[{"role": "user", "content": "Hello"}]'}],
    "batch": [{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hello"}}],
    "odd": [{'a "b" \n# c': "value", "n": 1}],
    "a word of Jinja": [{"none": "a value"}],
    "named like results": [{"id": 1, "Row": 2, "text": "a text", "response": "an answer", "a, b": 3}],
    "twins": [{"ID": 1, "Text": "another", "id": 2, "text": "a text"}],
    "ids that name no rows": [{"id": [7], "key": "k", "text": "a text"}],
    "prompt of messages": [{"prompt": [{"role": "user", "content": "Hello"}], "completion": [{"role": "assistant"}]}],
    "prompt of numbers": [{"prompt": 5, "title": "a title"}],
}


PROMPTS = {
    "text": "a text",
    "any text": "a title",
    "no name for Jinja": "Ada",
    "numbers alone": "3",
    "prompt": "Say hello.",
    "messages": "Hello",
    "messages as text": "Hello",
    "batch": "Hello",
    "odd": "value",
    "a word of Jinja": "a value",
    "named like results": "a text",
    "twins": "a text",
    "ids that name no rows": "a text",
    "prompt of messages": "Hello",
    "prompt of numbers": "a title",
}
IDS = {"text": "id", "named like results": "id", "twins": "id", "ids that name no rows": "key"}
PASSED = {"named like results": ["id", "text", "a, b"], "twins": ["Text", "id"]}


def as_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ROWS)
def test_it_loads_and_makes_a_prompt_of_every_row(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows, job = ROWS[kind], tmp_path / "my first job.yaml"
    write_job(str(as_lines(tmp_path / "data: 1 #2.jsonl", rows)), job)
    spec = load_job(job)
    assert (spec.name, spec.output.path) == ("my-first-job", "out/my-first-job")
    assert (spec.input.id, spec.input.columns) == (IDS.get(kind), PASSED.get(kind))
    check_job(spec)
    prepared = prepare(spec)
    with prepared.open_dataset() as dataset:
        builder = PromptBuilder(prepared.spec, dataset.schema.names, prepared.tokenizer)
        ((prompt,),) = (builder.build(batch) for batch in dataset.batches())
    assert isinstance(prompt, Prompt)
    assert PROMPTS[kind] in prepared.tokenizer.decode_batch([list(prompt.token_ids)])[0]


@pytest.mark.parametrize("name", ["2026", "no", "null", "1e5", "0x1F", "12.30"])
def test_the_files_name_is_the_jobs_as_text(tmp_path: Path, name: str) -> None:
    write_job(str(as_lines(tmp_path / "data.jsonl", ROWS["text"])), tmp_path / f"{name}.yaml")
    assert load_job(tmp_path / f"{name}.yaml").name == name


def test_columns_are_named(tmp_path: Path) -> None:
    path = tmp_path / "many.parquet"
    pq.write_table(pa.table({f"c{i}": pa.array(["x"]) for i in range(14)}), path)
    write_job(str(path), tmp_path / "job.yaml")
    text = (tmp_path / "job.yaml").read_text(encoding="utf-8")
    assert '"c0" text, "c1" text' in text and "and 2 more" in text


def test_types_are_told_whole_and_in_few_words(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a", "b": 1, "c": 2, "d": 3}]}
    write_job(str(as_lines(tmp_path / "data.jsonl", [{"m": [message], "n": 1}])), tmp_path / "job.yaml")
    text = (tmp_path / "job.yaml").read_text(encoding="utf-8")
    assert '# The input\'s columns: "m" list of {"role", "content"}, "n" int64\n' in text
    write_job(str(as_lines(tmp_path / "data.jsonl", [message])), tmp_path / "other.yaml")
    assert '"content" list of {"type", "text", "b", "c", ...}\n' in (tmp_path / "other.yaml").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize(
    ("name", "proposed"),
    [("ticket_id", True), ("ticketId", True), ("paid", False), ("PAID", False), ("id list", False)],
)
def test_a_column_named_like_an_id_is_proposed(tmp_path: Path, name: str, proposed: bool) -> None:
    write_job(str(as_lines(tmp_path / "data.jsonl", [{"text": "a", name: 1}])), tmp_path / "job.yaml")
    text = (tmp_path / "job.yaml").read_text(encoding="utf-8")
    assert (f'  # id: "{name}"' in text) == proposed and load_job(tmp_path / "job.yaml").input.id is None
    (tmp_path / "taken.yaml").write_text(text.replace("# id:", "id:"), encoding="utf-8")
    assert load_job(tmp_path / "taken.yaml").input.id == (name if proposed else None)


def test_nothing_is_written_over(tmp_path: Path) -> None:
    source, job = as_lines(tmp_path / "data.jsonl", ROWS["text"]), tmp_path / "job.yaml"
    job.write_text("mine", encoding="utf-8")
    with pytest.raises(UsageError, match=r"already exists; give another name with --out"):
        write_job(str(source), job)
    assert job.read_text(encoding="utf-8") == "mine"
    with pytest.raises(UsageError, match="cannot be written"):
        write_job(str(source), tmp_path / "no" / "job.yaml")


def test_a_full_disk_leaves_no_half_of_a_job_file(tmp_path: Path) -> None:
    source, job = as_lines(tmp_path / "data.jsonl", ROWS["text"]), tmp_path / "job.yaml"
    with file_size_limit(100), pytest.raises(UsageError, match=r"job\.yaml: cannot be written: File too large"):
        write_job(str(source), job)
    assert not job.exists()
    write_job(str(source), job)


def test_an_input_without_rows_tells_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(InputError, match="has no rows"):
        write_job(str(tmp_path / "empty.jsonl"), tmp_path / "job.yaml")
    assert not (tmp_path / "job.yaml").exists()


def test_a_name_that_no_job_file_can_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    as_lines(Path(os.fsdecode(b"\xff.jsonl")), ROWS["text"])
    for source, said in ((os.fsdecode(b"\xff.jsonl"), r"^'\\udcff\.jsonl': the name is not UTF-8"), ("", "empty text")):
        with pytest.raises(InputError, match=said):
            write_job(source, tmp_path / "job.yaml")
    assert not (tmp_path / "job.yaml").exists()


def test_the_delimiter_of_csv_files_goes_into_the_job(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text("text;n\na, b;1\n")
    with pytest.raises(InputError, match=r'input\.delimiter: ";"'):
        write_job(str(tmp_path / "data.csv"), tmp_path / "job.yaml")
    with pytest.raises(JobFileError, match=r"input\.delimiter: must be one character"):
        write_job(str(tmp_path / "data.csv"), tmp_path / "job.yaml", Wanted(delimiter=";;"))
    write_job(str(tmp_path / "data.csv"), tmp_path / "job.yaml", Wanted(delimiter=";"))
    spec = load_job(tmp_path / "job.yaml")
    assert spec.input.delimiter == ";" and check_job(spec)["input columns"] == "text string, n string"


def test_an_input_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    (tmp_path / "list.jsonl").write_text('[{"text": "a"}]\n')
    with pytest.raises(InputError, match=r"list\.jsonl:1: the line is a list"):
        write_job(str(tmp_path / "list.jsonl"), tmp_path / "job.yaml")
