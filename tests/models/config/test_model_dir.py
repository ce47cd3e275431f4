"""Finding a model, fingerprinting it, and reading what it suggests: all without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file

from bulkrun.errors import ModelError
from bulkrun.models.config.find_model import resolve_adapter, resolve_model
from bulkrun.models.config.model_dir import (
    adapter_fingerprint,
    eos_token_ids,
    generation_defaults,
    ignored_defaults,
    model_fingerprint,
    tensors_fingerprint,
)
from bulkrun.models.files.weight_files import weight_files
from tests.failing_disk import unreadable
from tests.models.tiny_encoders import save_tiny_classifier, save_tiny_encoder, write_modules
from tests.models.tiny_models import EOS_TOKEN_ID, save_tiny_model


def test_no_torch_is_loaded() -> None:
    code = "import sys; from bulkrun.models.config import model_config, model_dir; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bundled_and_local_names_are_directories(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    assert resolve_model("bundled:tiny", bundled_root=tmp_path) == tmp_path / "tiny"
    assert resolve_model(str(tmp_path / "tiny"), bundled_root=tmp_path / "nowhere") == tmp_path / "tiny"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bundled:huge", r"'bundled:huge' is not bundled; these are: bundled:tiny"),
        ("bundled:../tiny", r"is not bundled"),
        ("./nothing", r"no such directory"),
        ("/nothing/at/all", r"no such directory"),
        ("~nobody-has-this-name/model", r"no such directory"),
        ("tiny/config.json", r"is a file; give the directory"),
        ("not a name", r"not a hub id"),
    ],
)
def test_a_name_that_leads_nowhere(name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=message):
        resolve_model(name, bundled_root=tmp_path)


_REPOSITORY = ("config.json", "model.safetensors", "consolidated.safetensors", "original/model.safetensors",
               "adapter/adapter_model.safetensors", "onnx/config.json", "tokenizer.json", "pytorch_model.bin",
               "modeling_x.py")  # fmt: skip


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Downloads from a repository land here, as empty files but for what is there already."""

    def download(repo: str, revision: str | None, **patterns: list[str]) -> str:
        assert repo == "Qwen/Qwen3-0.6B"
        for name in filter_repo_objects(_REPOSITORY, **patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return tmp_path


def test_a_hub_that_hangs_up_without_a_word_is_told_too(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message with no first line ended the command with an IndexError."""

    def hang_up(repo: str, **patterns: list[str]) -> str:
        raise TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", hang_up)
    with pytest.raises(ModelError, match=r"the hub did not give it: TimeoutError; check the name"):
        resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub)


def test_hub_models_are_safe_files_once(hub: Path) -> None:
    save_tiny_model(hub, "qwen3")
    (hub / "model.safetensors").unlink()
    (hub / "generation_config.json").unlink()
    assert resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub) == hub
    assert sorted(file.name for file in hub.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_hub_models_that_cannot_run_are_not_downloaded(hub: Path) -> None:
    (hub / "config.json").write_text('{"architectures": ["ZambaForCausalLM"], "mamba_d_state": 16}')
    with pytest.raises(ModelError, match="ZambaForCausalLM is not supported"):
        resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub)
    assert [file.name for file in hub.iterdir()] == ["config.json"]


def test_hub_models_that_embed_come_with_their_modules(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ("modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin", "sentence_bert_config.json", "config_sentence_transformers.json")  # fmt: skip
    monkeypatch.setitem(globals(), "_REPOSITORY", (*_REPOSITORY, *more))
    save_tiny_encoder(hub, "bert")
    (hub / "model.safetensors").unlink()
    write_modules(hub, dense=[torch.nn.Linear(48, 8)], normalize=False)
    for name in ("sentence_bert_config.json", "config_sentence_transformers.json", "tokenizer_config.json"):
        (hub / name).write_text("{}")
    before = {file.relative_to(hub).as_posix() for file in hub.rglob("*") if file.is_file()}
    assert resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub, task="embed") == hub
    now = {file.relative_to(hub).as_posix() for file in hub.rglob("*") if file.is_file()}
    assert now - before == {"model.safetensors", "tokenizer.json"}
    with pytest.raises(ModelError, match="BertModel is not supported"):
        resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub)


def test_hub_models_that_classify_have_a_head_or_are_not_downloaded(hub: Path) -> None:
    save_tiny_model(hub, "qwen3")
    (hub / "model.safetensors").unlink()
    (hub / "generation_config.json").unlink()
    with pytest.raises(ModelError, match="Qwen3ForCausalLM, and none ends in ForSequenceClassification"):
        resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub, task="classify")
    assert [file.name for file in hub.iterdir()] == ["config.json"]
    save_tiny_classifier(hub, "bert")
    (hub / "model.safetensors").unlink()
    assert resolve_model("Qwen/Qwen3-0.6B", bundled_root=hub, task="classify") == hub
    assert (hub / "model.safetensors").exists()


def test_adapters_come_from_the_hub_without_the_steps_of_their_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "tokenizer.json", "README.md",
             "checkpoint-500/adapter_model.safetensors", "chat_template.jinja", "training_args.bin",
             "1_Pooling/config.json")  # fmt: skip
    header = b"{}".ljust(8)

    def download(repo: str, revision: str | None, **patterns: list[str]) -> str:
        for name in filter_repo_objects(files, **patterns):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header)
        (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 16}')
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_adapter("acme/lora") == tmp_path
    got = sorted(file.name for file in tmp_path.iterdir())
    assert got == [
        "1_Pooling",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
    ]
    (tmp_path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(ModelError, match="adapter_model"):
        resolve_adapter(str(tmp_path))


def test_an_adapters_fingerprint_sees_its_config_and_its_weights(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "adapter", "llama")
    (path / "adapter_config.json").write_text('{"lora_alpha": 16}')
    seen = {adapter_fingerprint(path)}
    assert adapter_fingerprint(path) in seen
    (path / "adapter_config.json").write_text('{"lora_alpha": 8}')
    seen.add(adapter_fingerprint(path))
    save_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2)
    (path / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    seen.add(adapter_fingerprint(path))
    whole = bytearray((path / "model.safetensors").read_bytes() + bytes(2**18))
    whole[-(2**17) :: 2**18] = b"1"  # between two of the blocks that tell large models apart
    (path / "model.safetensors").write_bytes(whole[: -(2**18)] + bytes(2**18))
    seen.add(adapter_fingerprint(path))
    (path / "model.safetensors").write_bytes(whole)
    assert len({*seen, adapter_fingerprint(path)}) == 5


def test_a_head_that_was_trained_anew_is_seen_wherever_it_lies(tmp_path: Path) -> None:
    """RoBERTa's lies between the header and the first of the blocks that tell large models apart."""

    def save(head: float) -> str:
        tensors = {f"roberta.encoder.layer.{n}.attention.self.query.weight": torch.zeros(99, 100) for n in range(99)}
        save_file(tensors | {"classifier.out_proj.weight": torch.full((3, 700), head)}, tmp_path / "model.safetensors")
        return tensors_fingerprint(tmp_path)

    first, before = save(1), model_fingerprint(tmp_path)
    assert save(2) != first and save(1) == first
    assert model_fingerprint(tmp_path) == before


def test_offline_says_what_was_tried_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, **options: Any) -> str:
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=r"no directory 'a/b' here .* hub cannot be reached.*hf download a/b"):
        resolve_model("a/b", bundled_root=tmp_path)


def test_fingerprint_sees_every_part_of_the_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "model", "llama")
    seen = {model_fingerprint(path)}
    assert model_fingerprint(path) in seen
    for name, text in (("tokenizer.json", "{}"), ("config.json", "{}"), ("generation_config.json", "{}")):
        (path / name).write_text(text)
        assert model_fingerprint(path) not in seen
        seen.add(model_fingerprint(path))
    save_tiny_model(tmp_path / "other", "llama", num_hidden_layers=2)
    (path / "model.safetensors").write_bytes((tmp_path / "other" / "model.safetensors").read_bytes())
    assert model_fingerprint(path) not in seen


def test_fingerprint_sees_the_modules_of_a_model_that_embeds(tmp_path: Path) -> None:
    path = save_tiny_encoder(tmp_path / "model", "bert")
    without = model_fingerprint(path)
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    assert model_fingerprint(path) == without  # nothing says that the folder is of the model
    write_modules(path, dense=[torch.nn.Linear(48, 8)])
    seen = {without, model_fingerprint(path)}
    assert len(seen) == 2
    changes: dict[str, str | bytes] = {
        "1_Pooling/config.json": '{"pooling_mode": "cls"}',
        "sentence_bert_config.json": '{"max_seq_length": 5}',
        "config_sentence_transformers.json": '{"prompts": {}}',
        "2_Dense/config.json": "{}",
        "2_Dense/model.safetensors": (path / "model.safetensors").read_bytes(),
        "vocab.txt": "[PAD]",
    }
    for name, content in changes.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        assert model_fingerprint(path) not in seen
        seen.add(model_fingerprint(path))


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each read of a file opened from its path gives, from here on."""
    counts: list[int] = []

    def counting_open(path: Path, *args: Any, **options: Any) -> Any:
        stream = open_path(path, *args, **options)
        read = stream.read

        def counting_read(*size: int) -> bytes:
            counts.append(len(content := read(*size)))
            return content

        stream.read = counting_read
        return stream

    open_path = Path.open
    monkeypatch.setattr(Path, "open", counting_open)
    return counts


def test_of_a_huge_file_a_fingerprint_reads_a_few_blocks(tmp_path: Path, bytes_read: list[int]) -> None:
    file = tmp_path / "model.safetensors"
    header = json.dumps({"x": {"dtype": "U8", "shape": [8 * 2**30], "data_offsets": [0, 8 * 2**30]}}).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + 8 * 2**30)  # sparse: takes no disk
    assert model_fingerprint(tmp_path)
    assert 2**12 < sum(bytes_read) < 2**18


def test_fingerprint_refuses_torn_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(ModelError, match=r"model\.safetensors: torn or not a safetensors file \(40 bytes\)"):
        model_fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({}, {"temperature": 0.0}),
        ({"do_sample": False, "temperature": 0.6, "top_k": 50}, {"temperature": 0.0}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "eos_token_id": [7, 8]},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "eos_token_ids": [7, 8]},
        ),
        ({"do_sample": True}, {}),
        ({"temperature": 0.8, "top_p": 0.9}, {"temperature": 0.8, "top_p": 0.9}),
        (
            {"max_new_tokens": 99, "repetition_penalty": 1.05, "eos_token_id": 7, "do_sample": True},
            {"max_tokens": 99, "repetition_penalty": 1.05, "eos_token_ids": [7]},
        ),
    ],
)
def test_generation_defaults(raw: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert generation_defaults(tmp_path) == expected


def test_no_generation_config_suggests_nothing(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    assert ignored_defaults(tmp_path) == []


@pytest.mark.parametrize(
    ("raw", "ignored"),
    [
        ({"do_sample": True, "top_k": 5, "max_length": 4096, "eos_token_id": 1, "cache_implementation": "hybrid"}, []),
        ({"num_beams": 1, "no_repeat_ngram_size": 0, "typical_p": 1.0, "bad_words_ids": None, "stop_strings": []}, []),
        (
            {"suppress_tokens": [3], "num_beams": 4, "stop_strings": "x"},
            ["suppress_tokens", "stop_strings", "num_beams"],
        ),
        ({"min_length": 0, "encoder_repetition_penalty": 1.0, "watermarking_config": None}, []),
        ({"min_length": 20, "encoder_repetition_penalty": 5.0}, ["min_length", "encoder_repetition_penalty"]),
    ],
)
def test_what_a_generation_config_asks_in_vain(raw: dict[str, Any], ignored: list[str], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(raw))
    assert ignored_defaults(tmp_path) == ignored


def test_ends_of_an_output_come_from_the_generation_config_else_the_config(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    assert eos_token_ids(tmp_path) == (EOS_TOKEN_ID,)
    (tmp_path / "generation_config.json").write_text('{"do_sample": true}')
    assert eos_token_ids(tmp_path) == (EOS_TOKEN_ID,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert eos_token_ids(tmp_path) == (7, 9)


@pytest.mark.parametrize("eos", ['["x"]', '{"a": 1}', '"x"', "[[1]]", "1.5"])
def test_ends_that_are_no_tokens_are_named(eos: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id: .* is neither a token id"):
        generation_defaults(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", pytest.param("[" * 100_000, id="deep")])
def test_broken_generation_config_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"generation_config\.json"):
        generation_defaults(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.json", "1_Pooling/config.json", "generation_config.json"]
)
def test_a_file_that_the_disk_does_not_give_is_named(name: str, tmp_path: Path) -> None:
    write_modules(save_tiny_encoder(tmp_path, "bert"))
    unreadable(tmp_path / name)
    read = generation_defaults if name.startswith("generation") else model_fingerprint
    with pytest.raises(ModelError, match=rf"/{name}: cannot be read: Input/output error; check the disk and"):
        read(tmp_path)


def test_an_index_and_the_tensors_of_a_classifier_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    save_tiny_classifier(tmp_path, "bert")
    (tmp_path / "model.safetensors").rename(tmp_path / "part.safetensors")
    index = unreadable(tmp_path / "model.safetensors.index.json")
    with pytest.raises(ModelError, match=f"{index}: cannot be read: Input/output error"):
        weight_files(tmp_path)
    with pytest.raises(ModelError, match=r"part\.safetensors: cannot be read: Input/output error"):
        unreadable(tmp_path / "part.safetensors")
        tensors_fingerprint(tmp_path)
