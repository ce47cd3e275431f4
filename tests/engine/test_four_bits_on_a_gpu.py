"""Checkpoints in four bits on a GPU, which is a stand-in: kept only where the model would leave no memory otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.quantized_layers import FourBitWeights
from bulkrun.models.loading import kept_four_bits
from bulkrun.models.loading.load_options import LoadOptions
from tests.engine.conftest import run
from tests.engine.gpu_stand_in import gpu_stand_in
from tests.engine.test_stored_quantized import GREEDY, SMALL, of_transformers, reference, requests
from tests.models.loading.test_stored_quantized import weights_on_a_gpu
from tests.models.tiny_mxfp4 import save_tiny_mxfp4
from tests.models.tiny_packed import save_tiny_packed

pytestmark = [
    pytest.mark.usefixtures("watched_kernels"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled for the GPU here, not interpreted"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),  # NaN is everywhere
]


NUM_TOKENS = 4  # kernels are interpreted
SIZES = {"hidden_size": 192, "intermediate_size": 192}  # of whole blocks of inputs, over six heads
OnAGpu = Callable[..., tuple[list[list[int]], Counter[str]]]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> OnAGpu:
    """A checkpoint's greedy tokens, and how many projections were in which form of four bits, where no memory is free.

    In the form "table" they are unpacked before every product, in others by the kernel that multiplies them.
    """

    def tokens(path: Path, **settings: Any) -> tuple[list[list[int]], Counter[str]]:
        monkeypatch.setattr(kept_four_bits, "_free_bytes", lambda device: 0)
        params = replace(GREEDY, max_tokens=NUM_TOKENS)
        asked = [replace(one, sampling=params) for one in requests()[:2]]
        with gpu_stand_in():
            engine = LLMEngine.from_model_dir(path, **(SMALL | {"device": "cuda"} | settings))
            completions = run(engine, asked)
        kept = [one for one in engine.model_runner.model.modules() if isinstance(one, FourBitWeights)]
        forms = Counter(one.four_bit_weight.form for one in kept)
        return [list(completions[one.request_id].token_ids) for one in asked], forms

    return tokens


def expected(plain: Path) -> list[list[int]]:
    return [tokens[:NUM_TOKENS] for tokens in of_transformers(reference(plain))[:2]]


@pytest.mark.parametrize(("name", "form"), [("gptq", "table"), ("ct_zeros", "whole")])
def test_a_model_that_would_leave_no_memory_stays_in_four_bits(
    name: str, form: str, tmp_path: Path, on_a_gpu: OnAGpu
) -> None:
    sizes = {"num_hidden_layers": 1} | (
        SIZES if form == "whole" else {}
    )  # all unpack alike, and the interpreter is slow
    stored, plain = save_tiny_packed(tmp_path, "qwen2", name, **sizes)
    assert on_a_gpu(stored) == (expected(plain), {form: 4})


@pytest.mark.slow
def test_experts_stay_so_too(tmp_path: Path, on_a_gpu: OnAGpu) -> None:
    stored, plain = save_tiny_packed(tmp_path / "awq", "qwen3_moe", "awq_whole", moe_intermediate_size=64)
    assert on_a_gpu(stored) == (expected(plain), {"table": 9, "whole": 2}), "what goes down has a whole block of inputs"
    sizes = {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64, "intermediate_size": 64}
    stored, plain = save_tiny_packed(tmp_path / "no gates", "nemotron_h_moe", "ct_zeros", **sizes)
    assert on_a_gpu(stored) == (expected(plain), {"table": 7, "whole": 7})
    stored, plain = save_tiny_mxfp4(tmp_path / "mxfp4", intermediate_size=128)
    assert on_a_gpu(stored, enforce_eager=False) == (expected(plain), {"e2m1": 2 * 3})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "form"),
    [("awq", "llama", "table"), ("awq_whole", "llama", "whole"), ("ct_group", "phi3", "table")],
)
def test_captured_steps_unpack_too(name: str, variant: str, form: str, tmp_path: Path, on_a_gpu: OnAGpu) -> None:
    stored, plain = save_tiny_packed(tmp_path, variant, name, **(SIZES if form == "whole" else {}))
    left_out = name != "awq"
    assert on_a_gpu(stored, enforce_eager=False) == (expected(plain), {form: 4 * 3 - left_out})


@pytest.mark.parametrize("deterministic", [False, True])
def test_deterministic_runs_have_no_unpacked_products(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go through the device's own, whose sums depend on the batch."""
    monkeypatch.setattr(kept_four_bits, "_free_bytes", lambda device: 0)
    stored, _ = save_tiny_packed(tmp_path, "llama", "gptq")
    weights = weights_on_a_gpu(stored, deterministic=deterministic)
    assert any(one.dtype == torch.uint8 for one in weights.values()) == (not deterministic)


def test_others_are_dequantized_or_quantized_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = save_tiny_packed(tmp_path, "llama", "gptq")
    config = ModelConfig.from_dir(stored)
    assert isinstance(config, DecoderConfig)
    model, gpu = Decoder(config), torch.device("cuda")
    num_bytes = sum(one.nbytes for one in model.parameters())  # float32
    for free, quantization, pays in (
        (2 * num_bytes, None, False),
        (2 * num_bytes - 2, None, True),
        (num_bytes, "fp8", False),
    ):
        monkeypatch.setattr(kept_four_bits, "_free_bytes", lambda device, free=free: free)
        options = LoadOptions(dtype=torch.float32, device=gpu, quantization=quantization)
        assert kept_four_bits.keeping_pays(model, options) == pays


def test_what_torch_has_cached_of_an_engine_before_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next adapter's model would stay in four bits where the first one's did not."""
    stored, _ = save_tiny_packed(tmp_path, "qwen2", "gptq", num_hidden_layers=1)
    with gpu_stand_in(memory_bytes=2**30):
        cached = [2**30]
        monkeypatch.setattr(torch.cuda, "empty_cache", cached.clear)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**30 - sum(cached), 2**30))
        model = LLMEngine.from_model_dir(stored, **(SMALL | {"device": "cuda"})).model_runner.model
    assert not any(isinstance(one, FourBitWeights) for one in model.modules())
