"""Models that see or hear, given text alone: their text part writes what the whole does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bulkrun.errors import ModelError
from bulkrun.models.config.architectures import _TEXT_PARTS
from bulkrun.models.config.encoder_config import text_config
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.language_model import LanguageModel
from tests.models.load import load_model
from tests.models.paged_driver import assert_same_tokens, forced_logits
from tests.models.tiny_models import SMALL, VOCAB_SIZE
from tests.models.tiny_text_parts import TEXT_PARTS, save_text_part

TOKENS = [3 + 11 * n % (VOCAB_SIZE - 9) for n in range(57)]  # the last ids may stand for images


def load(path: Path) -> LanguageModel:
    return load_model(path, dtype=torch.float32, device="cpu")


@torch.inference_mode()
def assert_same(path: Path, reference: transformers.PreTrainedModel) -> None:
    (ours,) = forced_logits(load(path), [TOKENS], [31])
    theirs = reference(input_ids=torch.tensor([TOKENS])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert_same_tokens(ours, theirs)


def leave_out_towers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3n's are timm's, which the tests do without."""
    make = transformers.AutoModel.from_config

    def without(config: transformers.PreTrainedConfig) -> torch.nn.Module:
        return make(config) if config.model_type.endswith("_text") else torch.nn.Identity()

    monkeypatch.setattr(transformers.AutoModel, "from_config", without)


@pytest.mark.parametrize("name", TEXT_PARTS)
def test_the_text_part_writes_what_the_whole_model_does(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "gemma3n":
        leave_out_towers(monkeypatch)
    reference = save_text_part(tmp_path, name)
    if name == "llama4":  # transformers 5.24 looks for what images became, of text alone too
        reference = reference.language_model
    capfd.readouterr()
    assert_same(tmp_path, reference)
    assert "UNEXPECTED" not in "".join(capfd.readouterr()), "the towers' tensors are no news"


def test_every_kind_of_text_part_runs_in_our_decoder() -> None:
    kinds = {architecture for parts in _TEXT_PARTS.values() for architecture in parts.values()}
    assert kinds <= {*FAMILIES}


@pytest.mark.parametrize(
    "prefixes", [("model.language_model.", "lm_head."), ("language_model.model.", "language_model.lm_head.")]
)
def test_both_ways_to_name_the_tensors(prefixes: tuple[str, str], tmp_path: Path) -> None:
    reference = save_text_part(tmp_path, "mistral4")
    file = tmp_path / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(file).items():
        name = name.replace("language_model.model.", "model.language_model.").replace(
            "language_model.lm_head", "lm_head"
        )
        renamed[name.replace("model.language_model.", prefixes[0]).replace("lm_head.", prefixes[1])] = tensor
    save_file(renamed, file, {"format": "pt"})
    assert_same(tmp_path, reference)


def test_experts_by_columns_as_qwen3_vl_was_published(tmp_path: Path) -> None:
    reference = save_text_part(tmp_path, "qwen3_vl_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert tensors["model.language_model.layers.0.mlp.experts.down_proj"].shape == (5, 48, 32)
    save_file(
        {name: one.transpose(1, 2).contiguous() if name in turned else one for name, one in tensors.items()}, file
    )
    assert_same(tmp_path, reference)


def test_a_published_qwen2_5_vl_has_no_text_config(tmp_path: Path) -> None:
    reference = save_text_part(tmp_path, "qwen2_5_vl")
    raw = json.loads((tmp_path / "config.json").read_text())
    text = raw.pop("text_config") | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    theta = text.pop("rope_parameters")["rope_theta"]
    (tmp_path / "config.json").write_text(json.dumps(text | raw | {"model_type": "qwen2_5_vl", "rope_theta": theta}))
    assert ModelConfig.from_dir(tmp_path).architecture == "Qwen2ForCausalLM"
    assert_same(tmp_path, reference)


@pytest.mark.parametrize(
    "text",
    [
        {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "vocab_size": 32_064},
        {"model_type": "mistral", "intermediate_size": 14_336, "max_position_embeddings": 32_768,
         "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": None},
    ],
)  # fmt: skip
def test_sizes_that_published_llavas_leave_out_are_those_of_transformers(text: dict[str, Any]) -> None:
    config = ModelConfig.from_dict({"architectures": ["LlavaNextForConditionalGeneration"], "text_config": text})
    theirs = transformers.LlavaNextConfig(text_config=text).text_config
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (
        theirs.vocab_size, theirs.hidden_size, theirs.intermediate_size, theirs.num_hidden_layers,
    )  # fmt: skip
    assert (config.num_heads, config.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert config.max_position_embeddings == theirs.max_position_embeddings


def test_dummy_weights_of_a_text_part(tmp_path: Path) -> None:
    save_text_part(tmp_path, "gemma4")
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path, dtype=torch.float32, device="cpu", load_format="dummy")
    assert model.config.architecture == "Gemma4ForCausalLM"


def test_a_text_part_of_another_kind_is_refused_with_those_that_run(tmp_path: Path) -> None:
    save_text_part(tmp_path, "ministral3")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["model_type"] = "mistral9"
    with pytest.raises(
        ModelError, match=r"Mistral3ForConditionalGeneration .* 'mistral9'.* mistral, ministral3, mistral4"
    ):
        ModelConfig.from_dict(raw)
    with pytest.raises(ModelError, match="a model with a vision or audio part"):
        ModelConfig.from_dict(raw | {"architectures": ["SomeForConditionalGeneration"]})


def test_vectors_come_from_text_parts_that_look_back_alone() -> None:
    """transformers' code, where those run that look both ways, would run the whole model."""
    architecture, keys, _ = TEXT_PARTS["gemma4"]
    raw = {"architectures": [architecture], "text_config": {**SMALL, **keys}}
    assert isinstance(text_config(raw), DecoderConfig)
    raw["text_config"]["use_bidirectional_attention"] = "all"
    with pytest.raises(ModelError, match=r"Gemma4ForConditionalGeneration makes no vectors here: its text part looks"):
        text_config(raw)
