"""Checkpoints that differ from what their config.json says, beside what transformers makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.files.checkpoint import stored_tensors
from bulkrun.models.files.weight_files import weight_files
from bulkrun.models.loading import stored_weights
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import VOCAB_SIZE, edit_names, edit_weights, make_tiny_model, save_tiny_model

TOKENS = torch.randint(3, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(3))


def load(path: Path, **options: Any) -> Decoder:
    return load_model(path, dtype=options.pop("dtype", torch.float32), device="cpu", **options)


def edit_config(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@torch.inference_mode()
def assert_is_what_transformers_loads(model: Decoder, path: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    (ours,) = forced_logits(model, [TOKENS.tolist()], [21])
    torch.testing.assert_close(ours, reference(TOKENS[None]).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("variant", "shard"),
    [("llama", "1GB"), ("llama", "20KB"), ("llama_whole_panels", "1GB"), ("gemma2_uncapped", "20KB")],
)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_head_that_is_not_the_embedding_counts_whatever_the_config_says(
    variant: str, shard: str, deterministic: bool, tmp_path: Path
) -> None:
    path = save_tiny_model(tmp_path, variant, max_shard_size=shard)
    edit_config(path, tie_word_embeddings=True)
    model = load(path, deterministic=deterministic)
    assert not model.config.tie_word_embeddings
    assert_is_what_transformers_loads(model, path)


@pytest.mark.parametrize("place", [0, 70, 130])
def test_one_number_makes_it_another_head(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "PIECE_BYTES", 1000)
    path = save_tiny_model(tmp_path, "llama_tied")
    head = make_tiny_model("llama_tied").model.embed_tokens.weight.data.clone()
    edit_weights(path, lm_head__weight=head)
    assert load(path).config.tie_word_embeddings
    head[place, 47] += 0.5
    edit_weights(path, lm_head__weight=head)
    model = load(path)
    assert torch.equal(model.embed_weight, make_tiny_model("llama_tied").model.embed_tokens.weight)
    assert_is_what_transformers_loads(model, path)


def test_heads_are_compared_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_tied", dtype=torch.bfloat16)
    edit_weights(path, lm_head__weight=make_tiny_model("llama_tied").model.embed_tokens.weight.data.clone())
    assert load(path, dtype=torch.bfloat16).config.tie_word_embeddings
    assert not load(path).config.tie_word_embeddings


def test_memory_is_asked_for_both_where_they_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where they do not: a tied head is laid out for products beside the embedding."""
    path = save_tiny_model(tmp_path, "llama")
    num_bytes = 4 * sum(parameter.numel() for parameter in make_tiny_model("llama").parameters())
    monkeypatch.setattr("bulkrun.models.loading.weights_fit.available_ram_bytes", lambda: num_bytes - 1)
    edit_config(path, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="do not fit on cpu"):
        load(path)
    edit_weights(path, lm_head__weight=None)
    with pytest.raises(ModelError, match="do not fit on cpu"):
        load(path)
    monkeypatch.setattr("bulkrun.models.loading.weights_fit.available_ram_bytes", lambda: num_bytes)
    assert load(path).config.tie_word_embeddings


def test_a_head_of_another_shape_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "PIECE_BYTES", 1000)  # the two are of so many pieces
    path = save_tiny_model(tmp_path, "llama_tied")
    edit_weights(path, lm_head__weight=torch.ones(130, 48))
    with pytest.raises(
        ModelError, match=r"tensor lm_head\.weight is \[130, 48\], but config\.json makes it \[131, 48\]"
    ):
        load(path)


def test_a_body_saved_under_its_own_name_with_a_head_is_a_whole_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_config(path, architectures=["LlamaModel"])
    assert_is_what_transformers_loads(load(path), path)
    edit_weights(path, lm_head__weight=None)
    with pytest.raises(ModelError, match=r"no lm_head\.weight, so this is not a text-generating model"):
        load(path)


def test_a_body_saved_by_itself_is_a_tied_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_tied")
    edit_names(path, lambda name: name.removeprefix("model."))
    assert_is_what_transformers_loads(load(path), path)


@pytest.mark.parametrize("variant", ["mamba", "mamba2", "falcon_mamba", "nemotron_h"])
def test_a_body_saved_by_itself_under_mambas_names_gives_hidden_states(variant: str, tmp_path: Path) -> None:
    whole = make_tiny_model(variant)
    whole.base_model.save_pretrained(tmp_path)
    ours = load(tmp_path, has_head=False)
    assert torch.equal(ours.embed_weight, whole.get_input_embeddings().weight)


def test_a_tied_model_may_be_saved_with_its_head_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_tied")
    edit_names(path, lambda name: name.replace("model.embed_tokens", "lm_head"))
    assert_is_what_transformers_loads(load(path), path)
    edit_config(path, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"1 of \d+ tensors are missing: model\.embed_tokens\.weight"):
        load(path)


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen3_moe_whole_panels", "mixtral"])
@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_experts_in_the_layout_of_transformers_itself(variant: str, shard: str, tmp_path: Path) -> None:
    """One tensor for all experts of a layer, instead of the published one for each."""
    make_tiny_model(variant).save_pretrained(tmp_path, max_shard_size=shard, save_original_format=False)
    files = weight_files(tmp_path)
    assert "model.layers.2.mlp.experts.gate_up_proj" in {stored.name for stored in stored_tensors(files)}
    assert_is_what_transformers_loads(load(tmp_path), tmp_path)
    assert_is_what_transformers_loads(load(tmp_path, deterministic=True), tmp_path)


def test_a_fused_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    make_tiny_model("mixtral").save_pretrained(tmp_path, save_original_format=False)
    edit_weights(tmp_path, model__layers__1__mlp__experts__down_proj=None)
    with pytest.raises(ModelError, match=r"1 of \d+ tensors are missing: model\.layers\.1\.mlp\.experts\.down_proj"):
        load(tmp_path)


@pytest.mark.parametrize("variant", ["llama", "qwen3_moe_sliding", "mixtral"])
def test_a_model_cut_by_its_config_is_its_first_layers(
    variant: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tiny_model(tmp_path, variant)
    raw = json.loads((path / "config.json").read_text())
    assert raw["num_hidden_layers"] == 3
    edit_config(path, num_hidden_layers=2, layer_types=raw.get("layer_types", [])[:2] or None)
    assert_is_what_transformers_loads(load(path), path)
    assert "num_hidden_layers 2" in caplog.text


def test_nothing_but_whole_layers_is_left_out(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__layers__2__mlp__shared__weight=torch.ones(1), model__layers__9__x=torch.ones(1))
    with pytest.raises(ModelError, match=r"has no place for 1 of the tensors: model\.layers\.2\.mlp\.shared\.weight; "):
        load(path)


def test_the_value_head_of_a_training_is_left_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, v_head__summary__weight=torch.ones(1, 48), v_head__summary__bias=torch.ones(1))
    assert_is_what_transformers_loads(load(path), path)


@pytest.mark.parametrize(
    "name",
    [
        *("qweight", "qzeros", "scales", "weight_scale", "input_scale", "weight_scale_inv", "k_scale", "weight.absmax"),
        *("weight_packed", "weight_zero_point", "SCB", "W_q"),
    ],
)
def test_quantized_weights_are_called_so_where_the_config_is_silent(name: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, **{f"model.layers.0.mlp.down_proj.{name}": torch.ones(1)})
    with pytest.raises(ModelError, match=rf"down_proj\.{name} is of quantized weights, .* use the model's bfloat16"):
        load(path)


def test_packed_weights_are_called_quantized_whatever_their_shape(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__layers__0__mlp__down_proj__weight=torch.ones(9, 1, dtype=torch.uint8))
    with pytest.raises(ModelError, match=r"down_proj\.weight holds torch\.uint8: quantized weights, which are not"):
        load(path)


def test_a_type_that_no_float_weights_have_is_called_quantized_too(tmp_path: Path) -> None:
    """MLX packs into 32 bits without a sign."""
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__layers__0__mlp__down_proj__weight=torch.ones(9, 1, dtype=torch.uint32))
    with pytest.raises(ModelError, match=r"down_proj\.weight holds U32: .*quantized.*; use the model's bfloat16"):
        load(path)


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_a_dtype_of_auto_is_what_most_weights_are_stored_in(key: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", dtype=torch.bfloat16)
    edit_weights(path, model__norm__weight=torch.ones(48))
    edit_config(path, **({"dtype": None} | {key: "auto"}))
    assert ModelConfig.from_dir(path).dtype == "bfloat16"
    (path / "model.safetensors").unlink()
    assert ModelConfig.from_dir(path).dtype == "float32"
