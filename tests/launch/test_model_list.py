"""What `bulkrun models` says: the levels, and the level of one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulkrun.errors import ModelError
from bulkrun.launch.model_list import describe_model, supported_models
from bulkrun.launch.preparation.prepare import BUNDLED_ROOT
from bulkrun.models.config.families import FAMILIES
from tests.models.tiny_encoders import save_tiny_encoder, write_modules
from tests.models.tiny_models import save_tiny_model
from tests.models.tiny_packed import PACKED, quantization_config
from tests.models.tiny_quantized import FORMATS

LEVELS = ("fast", "general", "embed", "classify", "unsupported")


def test_every_family_is_listed_and_every_level_says_why() -> None:
    rows = supported_models()["architectures"]
    by_level = {level: [row for row in rows if row["level"] == level] for level in LEVELS}
    assert sum(map(len, by_level.values())) == len(rows)
    assert [row["architecture"] for row in by_level["fast"]] == list(FAMILIES)
    assert "GPT2LMHeadModel" in [row["architecture"] for row in by_level["general"]]
    assert "encoder-decoder" in [row["family"] for row in by_level["unsupported"]]
    assert all(row["notes"] for row in rows)


def test_a_model_is_described_with_its_level(tmp_path: Path) -> None:
    assert describe_model("bundled:tiny")["level"] == "fast"
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 99,
            "vocab_size": 50, "torch_dtype": "float16"}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(gpt2))
    facts = describe_model(str(tmp_path))
    assert (facts["level"], facts["max_model_len"], facts["dtype"]) == ("general", 99, "float16")


def test_layers_of_other_heads_are_described_with_all_of_them(tmp_path: Path) -> None:
    text = {
        "model_type": "gemma4_text", "vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32,
        "max_position_embeddings": 99, "intermediate_size": 72,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    }  # fmt: skip
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    facts = describe_model(str(tmp_path))
    assert (facts["level"], facts["architecture"]) == ("fast", "Gemma4ForCausalLM")
    assert facts["heads"] == "4 query, 2 key/value of 16 or 2 key/value of 32"


def test_an_encoder_is_described_with_its_vectors(tmp_path: Path) -> None:
    save_tiny_encoder(tmp_path, "bert")
    facts = describe_model(str(tmp_path))
    assert (facts["level"], facts["vectors"]) == (
        "embed", "48 numbers, the job has to set embedding.pooling, normalized",
    )  # fmt: skip
    write_modules(tmp_path, {"pooling_mode": "cls"}, normalize=False)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "Q: "}}))
    assert describe_model(str(tmp_path))["vectors"] == "48 numbers, cls pooling, prompts query"
    assert "vectors" not in describe_model("bundled:tiny")


def test_an_unsupported_model_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ZambaForCausalLM"], "mamba_d_state": 16}))
    with pytest.raises(ModelError, match="ZambaForCausalLM is not supported: layers that keep a state"):
        describe_model(str(tmp_path))


@pytest.mark.parametrize(
    ("quantization", "weights"),
    [
        (FORMATS["fbgemm"].config, "fp8 (fbgemm_fp8)"),
        (FORMATS["block"].config, "fp8 (fp8, in blocks)"),
        (FORMATS["int8_channel"].config, "int8 (compressed-tensors)"),
        (quantization_config(PACKED["awq"]), "4 bits (awq, groups of 24)"),
    ],
)
def test_quantized_weights_are_described_so(quantization: dict[str, Any], weights: str, tmp_path: Path) -> None:
    raw = json.loads((BUNDLED_ROOT / "tiny" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": quantization}))
    assert describe_model(str(tmp_path))["weights"] == weights
    assert "weights" not in describe_model("bundled:tiny")


def test_a_model_that_cannot_be_loaded_is_not_described_as_if_it_could(tmp_path: Path) -> None:
    assert "cannot be loaded" not in describe_model("bundled:tiny")
    (tmp_path / "config.json").write_bytes((BUNDLED_ROOT / "tiny" / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").touch()
    facts = describe_model(str(tmp_path))
    assert facts["level"] == "fast" and "weights only as pickle" in facts["cannot be loaded"]


def test_states_are_told_where_layers_keep_some(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "lfm2")
    assert describe_model(str(tmp_path))["states"] == "of 3 layers, 1,152 bytes a row"
    assert "states" not in describe_model("bundled:tiny")
