"""Jobs that embed: what they leave open comes from the model's files and is recorded; what cannot be is said by key."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import BulkrunError, ResumeError
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.locate import located
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.job.store.run_gate import open_run
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT, PreparedJob, prepare

ASKED = {"query": "query: ", "document": "passage: "}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The bundled model with the files that sentence-transformers writes."""
    folder = tmp_path / "model"
    shutil.copytree(BUNDLED_ROOT / "tiny", folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
    write(folder / "modules.json", modules)
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 96})
    write(folder / "config_sentence_transformers.json", {"prompts": ASKED, "default_prompt_name": "document"})
    return folder


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def spec_of(model: Path | str, folder: Path, **sections: Any) -> JobSpec:
    (folder / "docs.jsonl").write_text('{"text": "a"}\n')
    return job_of(
        {
            "name": "vectors",
            "model": str(model),
            "task": "embed",
            "input": {"path": str(folder / "docs.jsonl")},
            "output": {"path": str(folder / "out")},
            **sections,
        }
    )


def prepared(model: Path, **sections: Any) -> PreparedJob:
    return prepare(spec_of(model, model.parent, **sections))


def test_the_job_gets_all_that_the_models_files_say(model: Path) -> None:
    job = prepared(model)
    made = job.spec.embedding
    assert (made.pooling, made.normalize, made.prompt, made.prompt_name) == ("mean", False, "passage: ", None)
    assert made.dimensions == json.loads((model / "config.json").read_text())["hidden_size"]
    assert job.max_model_len == job.spec.engine.max_model_len == 96
    again = prepare(JobSpec.model_validate(job.spec.model_dump(mode="json")))
    assert again.spec == job.spec, "a worker prepares the recorded job"


def test_what_the_job_says_counts_more(model: Path) -> None:
    job = prepared(
        model,
        embedding={"pooling": "last", "normalize": True, "dimensions": 32, "prompt_name": "query"},
        engine={"max_model_len": 128},
    )
    made = job.spec.embedding
    assert (made.pooling, made.normalize, made.dimensions, made.prompt) == ("last", True, 32, "query: ")
    assert job.max_model_len == 128
    assert prepared(model, embedding={"prompt": "own "}).spec.embedding.prompt == "own "
    assert prepared(model, embedding={"prompt": ""}).spec.embedding.prompt == ""


def test_a_model_without_prompts_puts_nothing_before_a_text(tmp_path: Path) -> None:
    spec = spec_of("bundled:tiny", tmp_path, embedding={"pooling": "last"})
    assert prepare(spec).spec.embedding.prompt == ""


def test_other_files_of_the_model_make_another_run(model: Path) -> None:
    first = prepared(model)
    open_run(first.run, first.record(None))
    first.run.shard(0).touch()
    write(
        model / "config_sentence_transformers.json",
        {"prompts": {"document": "doc: "}, "default_prompt_name": "document"},
    )
    other = prepared(model)
    with pytest.raises(ResumeError, match=r"embedding\.prompt: 'passage: ' -> 'doc: '"):
        other.enter(other.record(None), resume_anyway=True)


@pytest.mark.parametrize(
    ("embedding", "said"),
    [
        ({"dimensions": 9999}, r"job\.yaml:6:13: embedding\.dimensions: 9999 .*256"),
        ({"prompt_name": "querry"}, r"job\.yaml:6:13: embedding\.prompt_name: .*'querry'; did you mean query\?"),
        ({"prompt_name": "zzz"}, r"job\.yaml:6:13: embedding\.prompt_name: .*'zzz'; it has query, document"),
    ],
)
def test_what_the_model_cannot_do_is_said_where_it_stands(model: Path, embedding: dict[str, Any], said: str) -> None:
    path = model.parent / "job.yaml"
    path.write_text(
        f"name: a\nmodel: m\ntask: embed\ninput: {{path: x}}\noutput: {{path: o}}\nembedding: {json.dumps(embedding)}\n"
    )
    with pytest.raises(BulkrunError, match=said), located(path):
        prepared(model, embedding=embedding)


def test_a_model_that_does_not_say_how_it_pools_needs_the_job_to_say(tmp_path: Path) -> None:
    with pytest.raises(BulkrunError, match=r"embedding\.pooling: .* cls, mean or last"):
        prepare(spec_of("bundled:tiny", tmp_path))
