"""Checkpoints in four bits that stay so on a CPU: the tokens that transformers generates from what they mean."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.engine.llm_engine import LLMEngine
from bulkrun.models.decoder.quantized_layers import FourBitWeights
from bulkrun.models.loading import kept_four_bits
from bulkrun.models.loading.dtypes import cpu_multiplies_bfloat16
from bulkrun.ops.cpu.four_bit_linear import can_pack_four_bits
from bulkrun.request import Request, SamplingParams
from tests.engine.conftest import run
from tests.engine.test_stored_quantized import SMALL, of_transformers, reference, requests, tokens
from tests.models.fake_quantized import assert_best, fake_quantize
from tests.models.tiny_mxfp4 import save_tiny_mxfp4
from tests.models.tiny_packed import PACKED, save_tiny_packed
from tests.models.tiny_quantized import WHOLE
from tests.ops import int8_oracle

pytestmark = pytest.mark.skipif(
    not can_pack_four_bits(32, 64, 8, torch.float32, int8=True), reason="no compiled products on this machine"
)
# groups of 24 inputs, of 16, of 32, of all
SIZES = WHOLE | {"hidden_size": 192, "head_dim": 48, "intermediate_size": 384}
VARIANTS = {"gptq": "qwen2", "gptq_3_bits": "phi3", "awq": "qwen3_tied", "ct_group": "gemma2", "awq_whole": "olmo2"}
FORMS = [name for name, form in PACKED.items() if form.num_bits <= 4 and not form.shuffled]


def kept(path: Path, **settings: Any) -> int:
    """How many projections of the loaded model are in four bits."""
    engine = LLMEngine.from_model_dir(path, **(SMALL | {"device": "cpu"} | settings))
    model = engine.model_runner.model
    return sum(isinstance(one, FourBitWeights) for one in getattr(model, "model", model).modules())


@pytest.mark.parametrize("name", FORMS)
def test_tokens_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_packed(tmp_path, VARIANTS.get(name, "llama_biases"), name, **SIZES)
    assert tokens(stored) == of_transformers(reference(plain))
    left_out = PACKED[name].left_out != "lm_head"
    assert kept(stored) == 4 * 3 - left_out


@pytest.mark.parametrize(
    ("variant", "name", "num_kept"), [("glm4", "gptq", 3), ("cohere2", "awq", 3), ("gpt_neox", "gptq", 2)]
)
def test_projections_whose_rows_have_another_order_do_not_stay(
    variant: str, name: str, num_kept: int, tmp_path: Path
) -> None:
    """Codes lie as in the file, and such queries and keys do not: all tokens would be other ones."""
    stored, plain = save_tiny_packed(tmp_path, variant, name, **SIZES)
    assert tokens(stored) == of_transformers(reference(plain))
    assert kept(stored) == num_kept * 3


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "variant"), [("gptq", "qwen3_moe"), ("awq", "mixtral"), ("ct_zeros", "qwen3_moe")])
def test_experts_stay_in_four_bits_too(name: str, variant: str, deterministic: bool, tmp_path: Path) -> None:
    sizes = SIZES | ({"moe_intermediate_size": 96} if variant == "qwen3_moe" else {})
    stored, plain = save_tiny_packed(tmp_path, variant, name, **sizes)
    assert tokens(stored, deterministic=deterministic) == of_transformers(reference(plain))
    assert kept(stored, deterministic=deterministic) == 4 * 3


@pytest.mark.parametrize("deterministic", [False, True])
def test_experts_of_gpt_oss_stay_in_mxfp4(deterministic: bool, tmp_path: Path) -> None:
    stored, plain = save_tiny_mxfp4(tmp_path)
    assert tokens(stored, deterministic=deterministic) == of_transformers(reference(plain))
    assert kept(stored, deterministic=deterministic) == 2 * 3


@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_deterministic_runs_too(name: str, tmp_path: Path) -> None:
    stored, plain = save_tiny_packed(tmp_path, "llama", name, **SIZES)
    assert tokens(stored, deterministic=True) == of_transformers(reference(plain))
    assert kept(stored, deterministic=True) == 4 * 3


@pytest.fixture(params=["codes", "panels of int8"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How weights lie that are multiplied in int8."""
    monkeypatch.setattr(kept_four_bits, "available_ram_bytes", lambda: 0 if request.param == "codes" else 2**50)
    return str(request.param)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("name", "variant"), [("gptq", "qwen2"), ("awq", "mixtral"), ("ct_group", "gemma2")])
def test_in_int8_they_are_multiplied_as_weights_quantized_anew(
    name: str, variant: str, deterministic: bool, layout: str, tmp_path: Path
) -> None:
    stored, plain = save_tiny_packed(tmp_path, variant, name, **SIZES)
    settings = {"quantization": "int8", "deterministic": deterministic}
    ours = tokens(stored, **settings)
    assert ours == tokens(plain, **settings)
    assert bool(kept(stored, **settings)) == (layout == "codes")
    model = reference(plain)
    fake_quantize(model, int8_oracle.fake_quantized)
    for request, output in zip(requests(), ours, strict=True):
        assert_best(model, request.prompt_token_ids, output)


@pytest.mark.usefixtures("layout")
def test_gpt_oss_in_int8_too(tmp_path: Path) -> None:
    stored, plain = save_tiny_mxfp4(tmp_path, intermediate_size=128)
    assert tokens(stored, quantization="int8") == tokens(plain, quantization="int8")


@pytest.mark.parametrize(("free", "stays"), [(2**40, False), (2**16, True)])
def test_codes_stay_where_int8_would_take_most_of_the_memory(
    free: int, stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_four_bits, "available_ram_bytes", lambda: free)
    stored, _ = save_tiny_packed(tmp_path, "llama", "gptq", **SIZES)
    assert bool(kept(stored, quantization="int8")) == stays
    assert kept(stored) == 4 * 3


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_dummy_weights_are_of_four_bits_too(
    quantization: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_four_bits, "available_ram_bytes", lambda: 0)
    stored, _ = save_tiny_packed(tmp_path, "llama", "gptq", **SIZES)
    assert kept(stored, quantization=quantization, load_format="dummy") == 4 * 3
    assert len({tuple(output) for output in tokens(stored, quantization=quantization, load_format="dummy")}) == 3


@pytest.mark.parametrize(
    ("name", "sizes"), [("gptq", {"intermediate_size": 72}), ("gptq_act_order", {}), ("gptq_8_bits", {})]
)
def test_others_are_dequantized(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Sizes that fill no panels, inputs in groups of any order, more bits."""
    stored, _ = save_tiny_packed(tmp_path, "llama", name, **(SIZES | sizes))
    assert kept(stored) == (2 * 3 if sizes else 0), "attention's may stay"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_run_has_the_bits_of_weights_dequantized_beforehand(dtype: str, tmp_path: Path) -> None:
    """In bfloat16 too, where transformers' sums are others: logprobs of every token."""
    stored, plain = save_tiny_packed(tmp_path, "llama", "gptq", **SIZES)
    asked = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=3)
    both = []
    for path in (stored, plain):
        engine = LLMEngine.from_model_dir(path, **(SMALL | {"device": "cpu", "dtype": dtype}))
        outputs = run(engine, [Request(one.request_id, one.prompt_token_ids, asked) for one in requests()])
        both.append([(outputs[one.request_id].token_ids, outputs[one.request_id].logprobs) for one in requests()])
    assert both[0] == both[1]


def said(path: Path, caplog: pytest.LogCaptureFixture, **settings: Any) -> str:
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        LLMEngine.from_model_dir(path, **(SMALL | {"device": "cpu"} | settings))
    (line,) = (record.getMessage() for record in caplog.records if "stored in" in record.getMessage())
    return line


def test_the_log_says_what_they_are_multiplied_as(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, _ = save_tiny_packed(tmp_path, "llama", "gptq", **SIZES)
    how = "they stay so in memory, and are unpacked to float32 as they are multiplied"
    faster = "(engine.quantization: int8 is faster, at some loss of quality)"
    assert said(stored, caplog).endswith(f"stored in 4 bits (gptq, groups of 24); {how} {faster}")
    monkeypatch.setattr(kept_four_bits, "available_ram_bytes", lambda: 0)
    assert said(stored, caplog, quantization="int8").endswith("unpacked to int8 as they are multiplied")
    monkeypatch.setattr(kept_four_bits, "available_ram_bytes", lambda: 2**50)
    assert "quantized anew, to int8" in said(stored, caplog, quantization="int8")
    raw = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**raw, "dtype": "float16", "torch_dtype": "float16"}))
    faster = "; float16 becomes float32 on a CPU, engine.dtype: bfloat16 is faster"
    assert said(stored, caplog).endswith(faster) == cpu_multiplies_bfloat16()
    assert faster not in said(stored, caplog, dtype="bfloat16")
