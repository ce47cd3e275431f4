"""What a model's generation_config.json suggests is judged like what a job file says, before anything runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.engine.config import EngineConfig
from bulkrun.errors import InputError, JobFileError, ModelError, ResumeError, UsageError
from bulkrun.job.jobfile.engine import EngineSpec
from bulkrun.job.jobfile.load import job_of
from bulkrun.job.jobfile.sampling import SamplingSpec
from bulkrun.job.jobfile.spec import JobSpec
from bulkrun.launch.preparation.pool import refuse_small_pool
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT, prepare
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.settings import EngineArgs
from tests.s3_server import Bucket


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with one row of input, and the bundled model under ./model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    shutil.copytree(BUNDLED_ROOT / "tiny", tmp_path / "model")
    return tmp_path


def prepared(defaults: dict[str, Any], **sampling: Any) -> SamplingSpec:
    Path("model/generation_config.json").write_text(json.dumps(defaults))
    job = {"name": "try", "model": "model", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    spec = prepare(job_of({**job, "sampling": sampling})).spec
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec, "a run is recorded and read back"
    return spec.sampling


@pytest.mark.parametrize(
    ("key", "given", "taken"),
    [
        ("top_k", 50.0, 50),
        ("top_k", 0, 0),
        ("temperature", "0.7", 0.7),
        ("temperature", 1, 1.0),
        ("top_p", 1, 1.0),
        ("max_new_tokens", 2048.0, 2048),
    ],
)
def test_a_default_that_plainly_means_a_value_is_that_value(key: str, given: Any, taken: float) -> None:
    sampling = prepared({"do_sample": True, key: given})
    value = getattr(sampling, key.replace("max_new", "max"))
    assert (value, type(value)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("top_p", 0.0),
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
        ("top_k", 50.5),
        ("temperature", "warm"),
        ("temperature", float("nan")),
        ("temperature", [0.7]),
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
    ],
)
def test_a_default_that_cannot_be_used_names_file_key_value_and_what_to_set(key: str, given: Any) -> None:
    own = key.replace("max_new", "max")
    defaults = {"do_sample": True, key: given}
    with pytest.raises(ModelError) as caught:
        prepared(defaults)
    said = str(caught.value)
    assert said.startswith(f"model/generation_config.json: {key}: ")
    assert repr(given) in said or repr(float(given)) in said
    assert f"set sampling.{own} in the job file" in said
    assert getattr(prepared(defaults, **{own: 1}), own) == 1, "the job's own value makes the model's no matter"


def test_min_tokens_are_compared_with_the_models_max_tokens_where_the_job_has_none() -> None:
    assert prepared({"max_new_tokens": 2048}, min_tokens=300).max_tokens == 2048
    with pytest.raises(
        JobFileError, match=r"sampling\.min_tokens: 50 is more than max_tokens, 20 \(max_new_tokens in "
    ):
        prepared({"max_new_tokens": 20}, min_tokens=50)
    with pytest.raises(
        JobFileError, match=r"300 is more than max_tokens, 256 \(the default, .*; set sampling\.max_tok"
    ):
        prepared({}, min_tokens=300)


def test_the_plan_allows_as_long_a_context_as_the_engine_does() -> None:
    file = Path("model/config.json")
    raw = json.loads(file.read_text()) | {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}
    file.write_text(json.dumps(raw))
    job = {"name": "try", "model": "model", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    given = raw["max_position_embeddings"]
    for asked, allowed in ((None, given), (2 * given - 1, 2 * given - 1), (2 * given, 2 * given)):
        assert prepare(job_of({**job, "engine": {"max_model_len": asked}})).max_model_len == allowed
    with pytest.raises(UsageError, match=rf"engine\.max_model_len: 9999 is above the model's {2 * given} positions"):
        prepare(job_of({**job, "engine": {"max_model_len": 9999}}))


@pytest.mark.parametrize("wrong", [-1, 4096])
def test_a_stop_token_that_the_model_does_not_have_is_refused_and_not_an_error_of_every_row(wrong: int) -> None:
    assert prepared({}, stop_token_ids=[0, 4095]).stop_token_ids == [0, 4095]
    with pytest.raises(JobFileError, match=rf"^sampling\.stop_token_ids: {wrong} is .* go from 0 to 4095$"):
        prepared({}, stop_token_ids=[5, wrong])


def test_an_input_without_a_readable_row_says_what_is_wrong_with_its_first() -> None:
    Path("rows.jsonl").write_text('{\n  "text": "a"\n}\n')
    job = {"name": "try", "model": "model", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    with pytest.raises(InputError, match=r"rows\.jsonl:1: not valid JSON"):
        prepare(job_of(job)).open_dataset()


def test_results_inside_the_folder_of_the_input_are_refused_before_they_are_read_as_rows() -> None:
    Path("data").mkdir()
    Path("rows.jsonl").rename("data/rows.jsonl")
    job = {"name": "try", "model": "model", "input": {"path": ["data"]}}
    with pytest.raises(JobFileError, match=r"output\.path: 'data/out' lies in what input\.path 'data' reads"):
        prepare(job_of({**job, "output": {"path": "data/out"}}))
    assert prepare(job_of({**job, "output": {"path": "data/_out"}})).files


def test_a_delimiter_is_one_character_reaches_the_reader_and_is_part_of_what_a_run_is() -> None:
    Path("rows.csv").write_text("id;text\n1;a\n")
    job = {"name": "try", "model": "model", "input": {"path": "rows.csv", "delimiter": ";"}, "output": {"path": "out"}}
    prepared = prepare(job_of(job))
    with prepared.open_dataset() as dataset:
        assert dataset.schema.names == ["id", "text"]
    assert prepared.record(None).identity["input"]["delimiter"] == ";"
    plain = prepare(job_of({**job, "input": {"path": "rows.jsonl"}}))
    assert plain.record(None).identity["input"]["delimiter"] is None
    with pytest.raises(JobFileError, match=r"input\.delimiter: .*one character"):
        job_of({**job, "input": {"path": "rows.csv", "delimiter": "\\t"}})


def test_results_in_a_bucket_whose_state_is_elsewhere_are_refused_with_where_it_is(
    bucket: Bucket, folder: Path
) -> None:
    owner = {"run_id": "x", "state": "/scratch/state", "host": "node7"}
    bucket.put("out/_bulkrun.json", json.dumps(owner).encode())
    output = {"path": bucket.url("out"), "state": str(folder / "state")}
    job = prepare(job_of({"name": "try", "model": "model", "input": {"path": "rows.jsonl"}, "output": output}))
    with pytest.raises(ResumeError, match=r"another run \(x\), whose state is in /scratch/state on node7"):
        job.enter(job.record(None), resume_anyway=False)
    assert not (folder / "state").exists()


def tear(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def index_two_shards(folder: Path) -> None:
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors").rename(folder / names["a"])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tear, r"model\.safetensors: torn: \d+ bytes of \d+; download it again"),
        (
            index_two_shards,
            r"model-00002-of-00002\.safetensors: named in model\.safetensors\.index\.json but not there",
        ),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "weights only as pickle"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors; download the model's weights"),
    ],
)
def test_weights_that_are_not_there_are_said_before_a_run_is_made_of_them(
    damage: Callable[[Path], Any], said: str, folder: Path
) -> None:
    """A run that was entered without them would be one of another model as soon as they are there."""
    damage(folder / "model")
    job = {"name": "try", "model": "model", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    with pytest.raises(ModelError, match=said):
        prepare(job_of(job)).record(None)
    assert prepare(job_of(job | {"engine": {"load_format": "dummy"}})).record(None)


@pytest.mark.parametrize(
    ("engine", "fits"),
    [
        ({"kv_cache_memory_bytes": 1000}, False),
        ({"kv_cache_memory_bytes": 10**9}, True),
        ({"kv_cache_memory_bytes": 10**9, "max_model_len": 40}, True),
        ({"kv_cache_memory_bytes": 50_000, "max_model_len": 40}, False),
        ({}, True),
    ],
)
def test_a_pool_that_holds_no_sequence_is_refused_before_anything_is_loaded(engine: dict[str, int], fits: bool) -> None:
    job = {"name": "try", "model": "model", "input": {"path": "rows.jsonl"}, "output": {"path": "out"}}
    if fits:
        prepare(job_of({**job, "engine": engine}))
        return
    with pytest.raises(UsageError, match=r"^engine\.kv_cache_memory_bytes: \d+ bytes do not hold one sequence of"):
        prepare(job_of({**job, "engine": engine}))


@pytest.mark.parametrize("spare", [0, 1])
def test_what_is_refused_before_is_what_the_engine_refuses(spare: int) -> None:
    model = ModelConfig.from_dir(Path("model"))
    least = 4 * 8 * model.kv_size * 4  # blocks of 8 tokens in float32, one of them always empty
    args = {"kv_cache_memory_bytes": least - spare, "max_model_len": 20, "block_size": 8, "dtype": "float32"}
    with pytest.raises(UsageError) if spare else nullcontext():
        refuse_small_pool(EngineSpec(**args), model)
    with pytest.raises(UsageError) if spare else nullcontext():
        EngineConfig.resolve(model, torch.float32, torch.device("cpu"), EngineArgs(**args))
