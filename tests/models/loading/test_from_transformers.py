"""Weights that transformers reads: they are the model's own once it is loaded, whatever becomes of the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bulkrun.engine.embedding_engine import EmbeddingEngine
from bulkrun.errors import ModelError
from bulkrun.models.general.general_model import GeneralModel
from bulkrun.models.loading import from_transformers
from bulkrun.request import Request, SamplingParams
from bulkrun.settings import ClassificationArgs, EmbeddingArgs
from tests.failing_disk import unreadable
from tests.models.load import load_model
from tests.models.tiny_encoders import save_tiny_classifier, save_tiny_encoder, write_modules
from tests.models.tiny_models import edit_weights, save_tiny_model


def made_of(engine: EmbeddingEngine, name: str) -> bytes:
    engine.add_request(Request(name, (5, 6, 7, 8), SamplingParams(temperature=0, max_tokens=1), 0))
    [done] = engine.step()
    assert done.embedding is not None, done.error
    return done.embedding


@pytest.mark.parametrize("variant", ["bert", "bert_in_panels", "modernbert_in_panels"])
@pytest.mark.parametrize(
    ("save", "args"), [(save_tiny_encoder, EmbeddingArgs()), (save_tiny_classifier, ClassificationArgs())]
)
def test_a_file_that_is_written_over_while_the_model_runs_changes_no_row(
    save: Callable[..., Path], args: EmbeddingArgs | ClassificationArgs, variant: str, tmp_path: Path
) -> None:
    """A new checkpoint copied over the old one (cp, rsync --inplace) was the model of all rows that came after."""
    path, other = (save(tmp_path / name, variant, seed=seed) for seed, name in enumerate(("model", "other")))
    if isinstance(args, EmbeddingArgs):
        write_modules(path)
    engine = EmbeddingEngine.from_model_dir(path, args, dtype="float32", device="cpu")
    before = made_of(engine, "before")
    with (path / "model.safetensors").open("r+b") as file:
        file.write((other / "model.safetensors").read_bytes())
    again = EmbeddingEngine.from_model_dir(path, args, dtype="float32", device="cpu")
    assert made_of(engine, "after") == before != made_of(again, "again")
    assert np.isfinite(np.frombuffer(before, "<f4")).all()
    (path / "model.safetensors").open("wb").close()
    assert made_of(engine, "last") == before


def test_a_disk_that_fails_within_the_weights_is_named_and_ends_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under a map it would be a bus error: five workers dead in a row, and no file named."""
    path = save_tiny_encoder(tmp_path, "bert")
    write_modules(path)
    whole = from_transformers.weight_files
    monkeypatch.setattr(from_transformers, "weight_files", lambda path: [*whole(path), unreadable(path / "bad")])
    with pytest.raises(ModelError, match=r"/bad: cannot be read: Input/output error; check the disk"):
        EmbeddingEngine.from_model_dir(path, EmbeddingArgs(), dtype="float32", device="cpu")


def test_a_decoder_of_transformers_own_code_does_not_map_its_file(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gpt2")
    model = load_model(path, dtype=torch.float32, device="cpu")
    assert isinstance(model, GeneralModel)
    assert str(path / "model.safetensors") not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(
    ("save", "variant", "args"),
    [
        (save_tiny_encoder, "bert", EmbeddingArgs(pooling="mean")),
        (save_tiny_classifier, "bert", ClassificationArgs()),
        (save_tiny_classifier, "qwen3", ClassificationArgs()),  # whose head alone is read here
        (save_tiny_model, "gpt2", None),
    ],
)
def test_weights_of_8_bits_are_refused_where_config_json_is_silent(
    save: Callable[..., Path], variant: str, args: EmbeddingArgs | ClassificationArgs | None, dtype: torch.dtype,
    tmp_path: Path,
) -> None:  # fmt: skip
    """transformers takes them as they are: numbers up to 127 or 448, whatever their scales are."""
    path = save(tmp_path, variant)
    tensors = load_file(path / "model.safetensors")
    name = next(name for name in tensors if name.endswith(("score.weight", "0.output.dense.weight", "c_attn.weight")))
    scale = tensors[name].abs().max() / 127
    eight = {name: (tensors[name] / scale).to(dtype), f"{name}_scale": scale}
    edit_weights(path, **{key.replace(".", "__"): tensor for key, tensor in eight.items()})
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor {name} holds {dtype}: quantized weights"):
        if args is None:
            load_model(path, dtype=torch.float32, device="cpu")
        else:
            EmbeddingEngine.from_model_dir(path, args, dtype="float32", device="cpu")
