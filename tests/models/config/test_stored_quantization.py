"""What config.json says of weights in 8 bits: formats as they are on the hub, and all others by their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.packed_quantization import PackedQuantization
from bulkrun.models.config.stored_quantization import StoredQuantization, stored_quantization

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 99,
    "rms_norm_eps": 1e-5,
}
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
INPUTS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed(*groups: dict[str, Any], **keys: Any) -> dict[str, Any]:
    groups = groups or ({},)
    whole = [{"targets": ["Linear"], "weights": WEIGHTS, "input_activations": INPUTS} | group for group in groups]
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {f"group_{i}": group for i, group in enumerate(whole)},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **keys,
    }


def read(quantization: Any, key: str = "quantization_config") -> Any:
    return stored_quantization({key: quantization})


def test_no_word_of_it_is_no_quantization() -> None:
    assert stored_quantization({}) is None
    assert read(None) is None
    assert read({}) is None


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_compressed_tensors_by_channel(key: str) -> None:
    stored = read(compressed(), key)
    assert stored is not None
    assert (stored.method, stored.block_size, stored.quantizes_inputs) == ("compressed-tensors", None, True)


def test_inputs_may_be_left_as_they_are_and_blocks_may_have_a_scale() -> None:
    alone = read(compressed({"input_activations": None}))
    assert alone is not None
    assert not alone.quantizes_inputs
    mixed = read(compressed({}, {"input_activations": None}))
    assert mixed is not None
    assert not mixed.quantizes_inputs, "ours are, or are not, in all projections"
    block = read(compressed({"weights": WEIGHTS | {"strategy": "block", "block_structure": [128, 64]}}))
    assert block is not None
    assert block.block_size == (128, 64)


def int8(**changes: Any) -> dict[str, Any]:
    """`int-quantized`, its weights changed."""
    whole = {"weights": WEIGHTS | {"type": "int"} | changes, "input_activations": INPUTS | {"type": "int"}}
    return compressed(whole, format="int-quantized")


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_int8_is_read_with_a_scale_per_channel_or_one(strategy: str) -> None:
    stored = read(int8(strategy=strategy))
    assert stored is not None
    assert (stored.kind, stored.block_size, stored.quantizes_inputs) == ("int8", None, True)


def test_inputs_rounded_around_another_number_than_zero_are_not_as_ours() -> None:
    whole = int8()
    whole["config_groups"]["group_0"]["input_activations"]["symmetric"] = False
    stored = read(whole)
    assert stored is not None
    assert not stored.quantizes_inputs


def test_fp8_has_blocks_or_none() -> None:
    qwen = read({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
                 "modules_to_not_convert": ["lm_head"]})  # fmt: skip
    assert qwen == StoredQuantization(method="fp8", block_size=(128, 128), ignored=("lm_head",))
    auto = read({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]})
    assert auto == StoredQuantization(method="fp8", ignored=("lm_head",))
    fbgemm = read({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]})
    assert fbgemm == StoredQuantization(method="fbgemm_fp8", ignored=("lm_head",))


@pytest.mark.parametrize(
    ("ignored", "module", "is_quantized"),
    [
        ("lm_head.weight", "lm_head", False),
        ("model.layers.1", "model.layers.1.mlp.up_proj", False),
        ("model.layers.1", "model.layers.11.mlp.up_proj", True),
        ("mlp.up", "model.layers.1.mlp.up_proj", True),
        ("down_proj", "model.layers.1.mlp.down_proj", False),
        ("re:.*self_attn.*", "model.layers.1.self_attn.o_proj", False),
        ("re:self_attn", "model.layers.1.self_attn.o_proj", True),
    ],
)
def test_ignored_modules_are_named_whole_or_by_an_expression(ignored: str, module: str, is_quantized: bool) -> None:
    stored = read(compressed(ignore=[ignored]))
    assert stored is not None
    assert stored.quantizes(module) == is_quantized


def test_targets_may_be_expressions() -> None:
    stored = read(compressed({"targets": ["re:.*mlp.*"]}, {"targets": ["model.layers.0.self_attn.o_proj"]}))
    assert stored is not None
    modules = ("model.layers.3.mlp.up_proj", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj")
    assert [stored.quantizes(module) for module in modules] == [True, True, False]


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "with bitsandbytes are not supported; use the model's",
        ),
        (
            {"quant_method": "mxfp4"},
            "quantized with mxfp4 are not supported in models other than gpt-oss; .* or one in fp8 .* int8 .* 4 bits ",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quantized with modelopt are not"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "quantized with fp8 are not supported with fmt 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"fp8 are not supported in blocks of \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"in blocks of \[0, 128\]"),
        (compressed(format="pack-quantized"), "in format pack-quantized with weights of type float"),
        (compressed(format="int-quantized"), "with weights of type float, 8 bits"),
        (int8(symmetric=False), "with strategy channel, not symmetric"),
        (int8(strategy="group", group_size=128), "with strategy group"),
        (int8(num_bits=4), "with weights of type int, 4 bits"),
        (int8() | {"sparsity_config": {"format": "sparse-bitmask"}}, "with sparsity sparse-bitmask"),
        (compressed({"format": "int-quantized"}), "in format float-quantized, int-quantized"),
        (compressed({"format": "nvfp4-pack-quantized"}), "in format float-quantized, nvfp4-pack-quantized"),
        (compressed(config_groups={}), "in format float-quantized with 0 config_groups"),
        (compressed({}, {"weights": INT4}), "with weights of type int, 4 bits"),
        (compressed({"input_activations": INPUTS | {"num_bits": 4}}), "with inputs of type float, 4 bits"),
        (compressed({"weights": WEIGHTS | {"strategy": "group"}}), "with strategy group, symmetric; use"),
        (compressed({"weights": WEIGHTS | {"symmetric": False}}), "with strategy channel, not symmetric"),
        (compressed({"weights": WEIGHTS | {"strategy": "block", "block_structure": None}}), "in blocks of None"),
        (compressed({}, {"weights": WEIGHTS | {"strategy": "block", "block_structure": [8, 8]}}), "different blocks"),
        (compressed({"output_activations": INPUTS}), "with quantized outputs"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "with sparsity sparse-24-bitmask"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "with a transform_config"),
        (compressed(ignore=["re:*bad"]), r"'ignore' of the quantization holds 're:\*bad'"),
    ],
)
def test_other_quantization_is_refused_by_name(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=message) as error:
        ModelConfig.from_dir(tmp_path)
    assert str(error.value).startswith(str(tmp_path / "config.json"))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize(
    ("quantization", "offset", "summary"),
    [
        (GPTQ, 1, "4 bits (gptq, groups of 128)"),
        (GPTQ | {"checkpoint_format": "gptq", "dynamic": {"-:.*layers[.]3.*": {}}}, 1, "4 bits (gptq, groups of 128)"),
        (GPTQ | {"checkpoint_format": "gptq_v2", "bits": 8, "group_size": -1}, 0, "8 bits (gptq)"),
        (GPTQ | {"format": "GPTQ_v2"}, 0, "4 bits (gptq, groups of 128)"),  # as transformers 5 reads it
        (GPTQ | {"format": "gptq_v2", "checkpoint_format": "gptq"}, 1, "4 bits (gptq, groups of 128)"),
        (AWQ, 0, "4 bits (awq, groups of 128)"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 0, "4 bits (awq, groups of 64)"),
    ],
)
def test_gptq_and_awq(quantization: dict[str, Any], offset: int, summary: str) -> None:
    packing = read(quantization)
    assert isinstance(packing, PackedQuantization)
    assert (packing.layout, packing.zero_offset, packing.has_zeros) == (quantization["quant_method"], offset, True)
    assert packing.summary == summary


def packed(*changes: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """`pack-quantized`, the weights of its groups changed."""
    groups = [{"weights": INT4 | one, "input_activations": None} for one in changes or ({},)]
    return compressed(*groups, **{"format": "pack-quantized", **keys})


@pytest.mark.parametrize(
    ("changes", "group_size", "has_zeros"),
    [
        ({}, 128, False),
        ({"symmetric": False, "actorder": "group"}, 128, True),
        ({"strategy": "channel", "group_size": -1, "num_bits": 8}, None, False),
        ({"strategy": "tensor", "group_size": None}, None, False),
        ({"strategy": None}, 128, False),
    ],
)
def test_pack_quantized(changes: dict[str, Any], group_size: int | None, has_zeros: bool) -> None:
    packing = read(packed(changes))
    assert isinstance(packing, PackedQuantization)
    assert (packing.layout, packing.num_bits) == ("compressed", changes.get("num_bits", 4))
    assert (packing.group_size, packing.has_zeros) == (group_size, has_zeros)
    assert read(packed(changes, changes)) == packing


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (GPTQ | {"bits": 5}, "quantized with gptq are not supported with 5 bits"),
        (GPTQ | {"bits": None}, "with None bits"),
        (GPTQ | {"group_size": 0}, "with group_size 0"),
        (GPTQ | {"group_size": "128"}, "with group_size '128'"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq are not supported in checkpoint_format marlin"),
        (GPTQ | {"is_marlin_format": True}, "in checkpoint_format marlin"),
        (GPTQ | {"pack_dtype": "int16"}, "gptq are not supported packed in int16"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"for some modules \(dynamic: \+:"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"group_size": 32}}}, r"for some modules \(dynamic: \+:"),
        (GPTQ | {"format": "marlin"}, "gptq are not supported in checkpoint_format marlin"),
        (AWQ | {"version": "gemv"}, "awq are not supported in version gemv"),
        (AWQ | {"version": None, "format": "gemv_fast"}, "awq are not supported in version gemv_fast"),
        (AWQ | {"bits": 8}, "awq are not supported with 8 bits"),
        (packed({"num_bits": 3}), "compressed-tensors are not supported with 3 bits"),
        (packed({"strategy": "block"}), "in format pack-quantized with strategy block"),
        (packed({}, {"group_size": 64}), "with config_groups of different bits or group sizes"),
        (packed({"type": "float"}), "with weights of type float"),
        (compressed({"weights": INT4, "output_activations": INPUTS}, format="pack-quantized"), "quantized outputs"),
        (packed(transform_config={"config_groups": {"u": {}}}), "with a transform_config"),
    ],
)
def test_other_packings_are_refused_by_name(quantization: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(quantization)


@pytest.mark.parametrize("quantization", [compressed(config_groups={"a": 3}), compressed(config_groups={"a": {}})])
def test_a_broken_config_is_an_error_that_names_the_file(quantization: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": quantization}))
    with pytest.raises(ModelError, match=r"config\.json: "):
        ModelConfig.from_dir(tmp_path)


def test_only_the_fast_architectures_read_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA | {"quantization_config": compressed()}))
    config = ModelConfig.from_dir(tmp_path)
    assert isinstance(config, DecoderConfig)
    assert config.stored_quantization == read(compressed())
    file.write_text(
        json.dumps(LLAMA | {"quantization_config": compressed(), "architectures": ["PersimmonForCausalLM"]})
    )
    with pytest.raises(ModelError, match="compressed-tensors are read for the architectures that `bulkrun models`"):
        ModelConfig.from_dir(tmp_path)
