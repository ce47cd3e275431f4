"""The same vectors on a CUDA device: bf16 on both sides, and its whole path on the stand-in where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.engine.embedding_engine import EmbeddingEngine
from bulkrun.models.embedding import encoder_loader
from bulkrun.settings import DEFAULT_ENCODER_TOKENS, DEFAULT_MAX_NUM_BATCHED_TOKENS, ClassificationArgs, EmbeddingArgs
from tests.engine.gpu_stand_in import gpu_stand_in
from tests.engine.test_embedding_engine import MODELS, TOLERANCE, embed, texts
from tests.models.tiny_encoders import CLASSIFIERS, save_tiny_classifier

SIZES: dict[str, Any] = {"max_num_batched_tokens": 70}
LENS = (1, 7, 30, 31, 16, 2)  # of two steps
SHORT_SIZES, SHORT_LENS = {"max_num_batched_tokens": 16}, (1, 7, 12, 2)  # of two steps, where more is interpreted
HAS_GPU = torch.cuda.is_available()


@pytest.mark.gpu
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_vectors_point_where_those_of_the_cpu_do(name: str, pooling: Any, tmp_path: Path) -> None:
    """Each rounds to 8 bits in an order of its own, through three layers: directions agree to a cosine of 0.99."""
    path, args = MODELS[name](tmp_path), EmbeddingArgs(pooling=pooling)
    cpu, cuda = (
        embed(EmbeddingEngine.from_model_dir(path, args, device=device, dtype="bfloat16", **SIZES), texts())
        for device in ("cpu", "cuda")
    )
    assert (cpu * cuda).sum(-1).min() > 0.99


@pytest.mark.usefixtures("watched_kernels")
@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled for the GPU here, not interpreted")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
@pytest.mark.parametrize("pooling", [pytest.param("mean", marks=pytest.mark.slow), "last"])
@pytest.mark.parametrize("name", ["qwen3", "bert", pytest.param("mpnet", marks=pytest.mark.slow), "modernbert"])
def test_the_path_of_a_gpu_waits_for_vectors_alone(name: str, pooling: Any, tmp_path: Path) -> None:
    path, args = MODELS[name](tmp_path), EmbeddingArgs(pooling=pooling)
    prompts = texts(SHORT_LENS)
    expected = embed(EmbeddingEngine.from_model_dir(path, args, **SHORT_SIZES), prompts)
    with gpu_stand_in() as gpu:
        engine = EmbeddingEngine.from_model_dir(path, args, device="cuda", **SHORT_SIZES)
        gpu.waits.clear()
        found = embed(engine, prompts)
    assert gpu.waits.total() == 0
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", CLASSIFIERS)
def test_bfloat16_logits_are_nearest_to_the_same_text_s_on_the_cpu(variant: str, tmp_path: Path) -> None:
    path, args = save_tiny_classifier(tmp_path, variant), ClassificationArgs(activation="none")
    prompts = texts((2, 7, 17, 30, 96))
    cpu = embed(EmbeddingEngine.from_model_dir(path, args, device="cpu", dtype="float32"), prompts)
    cuda = embed(EmbeddingEngine.from_model_dir(path, args, device="cuda", dtype="bfloat16"), prompts)
    assert torch.cdist(cuda, cpu).argmin(-1).tolist() == list(range(len(prompts)))


@pytest.mark.skipif(HAS_GPU, reason="the stand-in takes the GPU's place")
def test_steps_of_encoders_are_larger_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They take less time than to launch them; a decoder's fill the device."""
    for pack_it in ("pack_encoder", "pack_transformer"):  # whose checks take the interpreter long
        monkeypatch.setattr(encoder_loader, pack_it, lambda *_: None)
    found = {}
    for variant in ("bert", "qwen3"):
        path = save_tiny_classifier(tmp_path / variant, variant)
        with gpu_stand_in():
            engine = EmbeddingEngine.from_model_dir(path, ClassificationArgs(), device="cuda")
        found[variant] = engine.sizes.max_num_batched_tokens
    assert found == {"bert": DEFAULT_ENCODER_TOKENS, "qwen3": DEFAULT_MAX_NUM_BATCHED_TOKENS["cuda"]}


@pytest.mark.usefixtures("watched_kernels")
@pytest.mark.skipif(HAS_GPU, reason="kernels are compiled for the GPU here, not interpreted")
@pytest.mark.parametrize(
    ("variant", "separator", "num_waits"),
    [pytest.param("bert", None, 0, marks=pytest.mark.slow), ("bert", 9, 0), ("gpt2", None, 6), ("qwen3", None, 0)],
)
def test_the_path_of_a_gpu_waits_for_scores_alone(
    variant: str, separator: int | None, num_waits: int, tmp_path: Path
) -> None:
    """But for models of transformers that look back alone, whose masks it looks at. Pairs have token types.

    A decoder's own way to its states is that to vectors, above: short texts show what a head does with them.
    """
    path, prompts = save_tiny_classifier(tmp_path, variant), texts((1, 7) if variant == "qwen3" else LENS)
    args = ClassificationArgs(pair_separator=separator)
    expected = embed(EmbeddingEngine.from_model_dir(path, args, **SIZES), prompts)
    with gpu_stand_in() as gpu:
        engine = EmbeddingEngine.from_model_dir(path, args, device="cuda", **SIZES)
        gpu.waits.clear()
        found = embed(engine, prompts)
    assert gpu.waits.total() == num_waits
    torch.testing.assert_close(found, expected, **TOLERANCE)
