"""What Gemma 3n has and no other family: several residual streams, a low-rank branch, gates of which few are open."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from bulkrun.errors import ModelError
from bulkrun.launch.bench.shapes import write_shape
from bulkrun.models.config.altup import AltUpConfig
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.decoder.decoder import Decoder
from tests.models.decoder.test_decoder import (
    check_wide_steps,
    load,
    random_tokens,
    transformers_logits,
    whole_prompt_logits,
)
from tests.models.load import load_model
from tests.models.paged_driver import tolerance_of
from tests.models.tiny_models import SMALL, VOCAB_SIZE, known, save_published, save_tiny_model

if not known(["gemma3n"]):
    pytest.skip("this version of transformers has no such model", allow_module_level=True)
FULL, SLIDING = "full_attention", "sliding_attention"
TOLERANCE = tolerance_of("gemma3n")
# E4B's and E2B's text parts, from memory (none could be downloaded here), in the forms that `transformers` writes:
# without what says nothing of the text part, and with a scale of queries that nobody reads
E4B: dict[str, Any] = {
    "model_type": "gemma3n_text",
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25,
    "altup_active_idx": 0,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_lr_multiplier": 1.0,
    "altup_num_inputs": 4,
    "attention_bias": False,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": [16_384] * 35,
    "laurel_rank": 64,
    "layer_types": [*[SLIDING] * 4, FULL] * 7,
    "max_position_embeddings": 32_768,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 15,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10_000.0,
    "rope_scaling": None,
    "rope_theta": 1_000_000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "vocab_size": 262_400,
    "vocab_size_per_layer_input": 262_144,
}
E2B = E4B | {
    "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    "intermediate_size": [8192] * 30,
    "layer_types": [*[SLIDING] * 4, FULL] * 6,
    "num_hidden_layers": 30,
    "num_kv_shared_layers": 10,
}


def read(**keys: Any) -> DecoderConfig:
    config = ModelConfig.from_dict({"architectures": ["Gemma3nForCausalLM"], **keys})
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(("name", "text"), [("e2b", E2B), ("e4b", E4B)])
def test_files_of_both_sizes_are_read_as_transformers_does(name: str, text: dict[str, Any], tmp_path: Path) -> None:
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "eos_token_id": [1, 106]}
    config = ModelConfig.from_dict(whole | {"text_config": text, "vision_config": {}, "audio_config": {}})
    assert isinstance(config, DecoderConfig)
    theirs = transformers.Gemma3nTextConfig(**text)
    written = {**theirs.to_dict(), "architectures": ["Gemma3nForCausalLM"], "eos_token_id": [1, 106]}
    saved = ModelConfig.from_dict(written)
    shape = ModelConfig.from_dir(
        write_shape(f"gemma-3n-{name}", tmp_path, dtype="bfloat16", max_model_len=config.max_position_embeddings)
    )
    assert saved == config == replace(shape, eos_token_ids=config.eos_token_ids)
    first_shared = theirs.num_hidden_layers - theirs.num_kv_shared_layers
    assert [kv.source for kv in config.layers_kv] == [
        *range(first_shared),
        *[first_shared - (1 if kind == FULL else 2) for kind in theirs.layer_types[first_shared:]],
    ]
    assert (config.mlp_sizes, config.mlp_sparsities) == (
        tuple(theirs.intermediate_size), tuple(theirs.activation_sparsity_pattern),
    )  # fmt: skip
    assert config.sliding_windows == tuple(512 if kind == SLIDING else None for kind in theirs.layer_types)
    assert config.ropes[3:5] == (RopeConfig(theta=10_000.0, head_dim=256), RopeConfig(theta=1e6, head_dim=256))
    assert config.layer_inputs == (256, 262_144) and config.altup == AltUpConfig(4, 64)
    assert (config.vocab_size, config.attention_scale, config.logits_soft_cap) == (262_400, 1.0, 30.0)
    assert config.eos_token_ids == (1, 106) and config.dtype == "bfloat16" and config.tie_word_embeddings


def test_what_a_file_does_not_say_is_as_in_transformers() -> None:
    theirs = transformers.Gemma3nTextConfig()
    assert read() == read(**{**theirs.to_dict(), "architectures": ["Gemma3nForCausalLM"], "eos_token_id": None})
    for num_layers in (10, 11):  # of more than ten the first ten are sparse
        few = {"num_hidden_layers": num_layers, "num_kv_shared_layers": 0, "intermediate_size": 64}
        theirs = transformers.Gemma3nTextConfig(**few)
        assert read(**few).mlp_sparsities == (*theirs.activation_sparsity_pattern,)
        assert read(**few).mlp_sizes == (*theirs.intermediate_size,)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_kv_shared_layers": 0, "layer_types": None, "num_hidden_layers": 6, "intermediate_size": 56,
         "activation_sparsity_pattern": None},
        {"altup_num_inputs": 2, "laurel_rank": 1, "tie_word_embeddings": False, "final_logit_softcapping": 3.0},
        {"attention_bias": True, "vocab_size_per_layer_input": VOCAB_SIZE, "query_pre_attn_scalar": 24},
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 5e4},
                             SLIDING: {"rope_type": "default", "rope_theta": 7e3}}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 3e4, "rope_local_base_freq": 5e3},
    ],
)  # fmt: skip
def test_published_keys_mean_what_they_mean_to_transformers(keys: dict[str, Any], tmp_path: Path) -> None:
    """And so do those that transformers writes anew."""
    reference = save_published(tmp_path / "published", "gemma3n", **keys)
    reference.save_pretrained(tmp_path / "saved")
    published, saved = (ModelConfig.from_dir(tmp_path / name) for name in ("published", "saved"))
    assert published == saved
    tokens = random_tokens(60, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path / "published", dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def drawn_keys(seed: int) -> dict[str, Any]:
    """Any of the architecture: sizes that fill panels or not, any number of streams, shared keys or none."""
    draw = random.Random(seed)
    is_whole, num_layers = draw.random() < 0.5, draw.randint(2, 6)
    num_shared = draw.choice((0, 1, 2)) if num_layers > 3 else 0
    kinds = [SLIDING, FULL, *(draw.choice((FULL, SLIDING)) for _ in range(num_layers - 2))]
    return {
        "hidden_size": 64 if is_whole else 48,
        "intermediate_size": [draw.choice((64, 96) if is_whole else (40, 72)) for _ in range(num_layers)],
        "activation_sparsity_pattern": [draw.choice((0.0, 0.4, 0.95)) for _ in range(num_layers)],
        "num_hidden_layers": num_layers,
        "num_attention_heads": draw.choice((2, 4)),
        "num_key_value_heads": draw.choice((1, 2)),
        "head_dim": draw.choice((16, 32)),
        "layer_types": kinds,
        "num_kv_shared_layers": num_shared,
        "sliding_window": draw.choice((5, 40)),
        "hidden_size_per_layer_input": draw.choice((8, 32)),
        "vocab_size_per_layer_input": draw.choice((90, VOCAB_SIZE)),
        "altup_num_inputs": draw.choice((2, 3, 4)),
        "laurel_rank": draw.choice((4, 32)),
    }


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("seed", range(8))
def test_any_layers_have_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    check_wide_steps(tmp_path, "gemma3n", seed, drawn_keys(seed))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"altup_active_idx": 1}, r"altup_active_idx 1 is not supported; 0 is"),
        ({"altup_correct_scale": False}, r"altup_correct_scale False is not supported; True is"),
        ({"altup_num_inputs": 1}, r"altup_num_inputs 1 is not supported; two residual streams or more are"),
        ({"laurel_rank": 0}, r"key 'laurel_rank' is 0, not a whole number above 0"),
        ({"hidden_size_per_layer_input": None}, r"key 'hidden_size_per_layer_input' is None, not a whole number"),
        ({"intermediate_size": [64] * 11}, r"key 'intermediate_size' has 11 values for 12 layers"),
        ({"intermediate_size": ["64"] * 12}, r"key 'intermediate_size' is '64', not a whole number above 0"),
        ({"activation_sparsity_pattern": [0.95] * 3}, r"'activation_sparsity_pattern' has 3 values for 12 layers"),
        (
            {"activation_sparsity_pattern": 0.95},
            r"'activation_sparsity_pattern' is 0\.95, not a list of a value for eac",
        ),
        ({"layer_types": SLIDING}, r"key 'layer_types' is 'sliding_attention', not a list"),
        ({"activation_sparsity_pattern": [1] * 12}, r"key 'activation_sparsity_pattern' has 1, not a part of 1"),
        ({"num_kv_shared_layers": 11}, r"layer 4 is to share the keys of an earlier one of its kind, and there is non"),
        ({"layer_types": [SLIDING] * 3}, r"'layer_types' has 3 values for 12 layers"),
    ],
)
def test_what_cannot_be_is_said(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**{**SMALL, "num_hidden_layers": 12, "num_kv_shared_layers": 4, **keys})


def test_tokens_beyond_the_table_of_layer_inputs_have_the_first_ones(tmp_path: Path) -> None:
    model = load(tmp_path, "gemma3n")
    assert model.layer_inputs is not None and model.layer_inputs.weight.shape[0] == 97
    tokens = [3, 130, 97, 96, 0, 99]
    theirs = transformers_logits("gemma3n", tokens)
    torch.testing.assert_close(whole_prompt_logits(model, tokens), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("projections", ["altup_projections", "altup_unembed_projections"])
@torch.no_grad()
def test_streams_that_are_nearly_nothing_grow_as_in_transformers(projections: str, tmp_path: Path) -> None:
    """They are scaled to the first one's length, but by no more than a mean square of 1e-5 asks for."""
    reference, tokens = save_published(tmp_path, "gemma3n"), random_tokens(30, seed=9)
    for name, parameter in reference.named_parameters():
        if projections in name:
            parameter.mul_(1e-3)
    reference.save_pretrained(tmp_path)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    torch.testing.assert_close(ours, reference(torch.tensor([tokens])).logits[0], atol=TOLERANCE, rtol=0)


def test_bfloat16_is_as_far_from_float32_as_transformers_is(tmp_path: Path) -> None:
    """The oracle of rounding: neither rounds where the other one does not."""
    tokens = random_tokens(100, seed=4)
    exact = transformers_logits("gemma3n", tokens)
    ours = whole_prompt_logits(load(tmp_path, "gemma3n", torch.bfloat16), tokens)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gemma3n", dtype=torch.bfloat16)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0].float()
    assert (ours - exact).square().mean() < 1.3 * (theirs - exact).square().mean()


def test_a_whole_model_beside_towers_leaves_them_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma3n")
    stored = {name.replace("model.", "model.language_model."): tensor
              for name, tensor in load_file(path / "model.safetensors").items()}  # fmt: skip
    towers = ("vision_tower.timm_model.x", "embed_vision.embedding", "audio_tower.y", "embed_audio.z")
    stored |= {f"model.{tower}.weight": torch.ones(2, 2) for tower in towers}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": raw}
    (path / "config.json").write_text(json.dumps(whole))
    model = load_model(path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder)
    tokens = random_tokens(40, seed=2)
    torch.testing.assert_close(
        whole_prompt_logits(model, tokens), transformers_logits("gemma3n", tokens), atol=TOLERANCE, rtol=0
    )
