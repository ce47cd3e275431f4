"""Loading: single file, shards and dtypes; every way a checkpoint can be wrong is an error that names the place."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from bulkrun import ops
from bulkrun.errors import ModelError
from bulkrun.models.config.model_config import ModelConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.loading.dtypes import default_dtype
from bulkrun.ops.matmul.linear import can_pack_bfloat16
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_models import edit_names, edit_weights, make_tiny_model, save_tiny_model


def load(path: Path) -> Decoder:
    return load_model(path, dtype=torch.float32, device="cpu")


def test_fused_parameters_hold_the_checkpoints_rows(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, "qwen3"))
    attention = make_tiny_model("qwen3").model.layers[2].self_attn
    ours = model.layers[2].attention
    rows = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(ours.qkv_proj.weight, rows)
    assert torch.equal(ours.qk_norm.weight[5], attention.q_norm.weight)
    assert torch.equal(ours.qk_norm.weight[6], attention.k_norm.weight)


def test_tensors_that_are_fused_in_the_checkpoint_stay_so(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, "phi3"))
    theirs = make_tiny_model("phi3").model.layers[1]
    assert torch.equal(model.layers[1].attention.qkv_proj.weight, theirs.self_attn.qkv_proj.weight)
    assert torch.equal(model.layers[1].mlp.gate_up_proj.weight, theirs.mlp.gate_up_proj.weight)


def test_experts_are_stacked_gate_over_up(tmp_path: Path) -> None:
    ours = load(save_tiny_model(tmp_path, "mixtral")).layers[2].mlp
    theirs = make_tiny_model("mixtral").model.layers[2].mlp
    assert torch.equal(ours.gate_up_proj.weight, theirs.experts.gate_up_proj)
    assert torch.equal(ours.down_proj.weight, theirs.experts.down_proj)
    assert torch.equal(ours.router.weight, theirs.gate.weight)


def test_norms_that_round_once_keep_float32_weights_with_their_offset(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma3")
    model = load_model(path, dtype=torch.bfloat16, device="cpu")
    theirs = make_tiny_model("gemma3").model
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.norm.weight, theirs.norm.weight + 1.0)
    assert torch.equal(model.layers[0].attention.qk_norm.weight[0], theirs.layers[0].self_attn.q_norm.weight + 1.0)
    assert model.layers[0].mlp_out.weight.dtype == torch.float32


@pytest.mark.parametrize("text_prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_model_that_also_sees(text_prefix: str, tmp_path: Path) -> None:
    text = make_tiny_model("gemma3").config
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    edit_names(tmp_path, lambda name: re.sub(r"^(language_model\.model|model\.language_model)\.", text_prefix, name))
    tokens = torch.arange(3, 60)
    with torch.inference_mode():
        theirs = model(input_ids=tokens[None]).logits[0]
    (ours,) = forced_logits(load(tmp_path), [tokens.tolist()], [31])
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_the_text_part_of_mistral_small_and_not_of_a_successor(tmp_path: Path) -> None:
    text = make_tiny_model("mistral").config.to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
              "head_dim": 16, "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokens = torch.arange(3, 60)
    (ours,) = forced_logits(load(tmp_path), [tokens.tolist()], [31])
    torch.testing.assert_close(ours, model(input_ids=tokens[None]).logits[0], atol=1e-4, rtol=1e-4)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["model_type"] = "mistral9"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="a model with a vision or audio part"):
        load(tmp_path)


@pytest.mark.parametrize(("variant", "is_tied"), [("qwen3_5", False), ("qwen3_5", True), ("qwen3_5_moe", False)])
@torch.inference_mode()
def test_the_text_part_of_qwen3_5_without_what_guesses_ahead(variant: str, is_tied: bool, tmp_path: Path) -> None:
    """Whether it has a head is what the whole model says, whose text part says that it has one."""
    name = "Qwen3_5Moe" if variant.endswith("moe") else "Qwen3_5"
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 48,
              "patch_size": 4, "num_position_embeddings": 16}  # fmt: skip
    config_class, model_class = (
        getattr(transformers, f"{name}{what}") for what in ("Config", "ForConditionalGeneration")
    )
    text = make_tiny_model(variant).config.to_dict()
    model = model_class(config_class(text_config=text, vision_config=vision, tie_word_embeddings=is_tied)).eval()
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    model.save_pretrained(tmp_path)
    edit_weights(tmp_path, mtp__layers__0__mlp__gate_proj__weight=torch.zeros(3, 3))
    tokens = torch.arange(3, 60)
    (ours,) = forced_logits(load(tmp_path), [tokens.tolist()], [31])
    torch.testing.assert_close(ours, model(input_ids=tokens[None]).logits[0], atol=2e-4, rtol=2e-4)


def test_a_sharded_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    single = load(save_tiny_model(tmp_path / "single", "llama"))
    sharded_path = save_tiny_model(tmp_path / "sharded", "llama", max_shard_size="40KB")
    assert len(list(sharded_path.glob("*.safetensors"))) > 2
    sharded = load(sharded_path)
    for (name, ours), other in zip(sharded.named_parameters(), single.parameters(), strict=True):
        assert torch.equal(ours, other), name


def test_weights_are_cast_to_the_asked_dtype_without_gradients(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", dtype=torch.bfloat16)
    model = load_model(path, dtype=torch.float16, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float16}
    assert not any(p.requires_grad for p in model.parameters())
    assert {inv_freq.dtype for inv_freq in model.inv_freqs.values()} == {torch.float32}


def test_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    model = load(save_tiny_model(tmp_path, "llama_tied"))
    assert model.lm_head.weight.data_ptr() == model.embed_weight.data_ptr()


@pytest.mark.parametrize("variant", ["llama", "llama_tied"])
def test_what_is_laid_out_anew_is_what_was_read(tmp_path: Path, variant: str) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    path = save_tiny_model(tmp_path, variant, vocab_size=128, **sizes)
    stored, model = load_file(path / "model.safetensors"), load(path)
    qkv = torch.cat([stored[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    head = stored["model.embed_tokens.weight" if variant == "llama_tied" else "lm_head.weight"]
    assert torch.equal(model.embed_weight, stored["model.embed_tokens.weight"]), "rows are looked up in it"
    assert torch.equal(model.layers[1].attention.qkv_proj.weight, ops.pack_linear_weight(qkv))
    assert torch.equal(model.lm_head.weight, ops.pack_linear_weight(head))


@pytest.mark.parametrize(
    ("variant", "fix"),
    [
        ("llama", "hold, set engine.quantization: int8, or take a smaller model"),
        ("gpt2", "hold, or take a smaller model"),
        ("mixtral", "hold, set engine.quantization: int8, or take a smaller model"),
    ],
)
def test_weights_beyond_the_memory_that_is_left_are_refused(
    tmp_path: Path, variant: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bulkrun.models.loading.weights_fit.available_ram_bytes", lambda: 2**10)
    reason = r"need 0\.0 GiB and do not fit on cpu \(0\.0 GiB of RAM may be taken\)"
    with pytest.raises(ModelError, match=rf"{reason}; free what other processes {fix}"):
        load(save_tiny_model(tmp_path, variant))


def test_known_leftovers_are_ignored(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_tied")
    edit_weights(path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    assert load(path).config.tie_word_embeddings


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ModelError, match=r"1 of \d+ tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(path)


def test_unexpected_tensor_is_named(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__layers__0__mlp__experts__weight=torch.ones(2))
    with pytest.raises(
        ModelError,
        match=r"a LlamaForCausalLM .* has no place for 1 of the tensors: model\.layers\.0\.mlp\.experts\.weight; ",
    ):
        load(path)


def test_all_unexpected_tensors_are_counted_and_the_key_for_biases_is_named(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama_biases")
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"attention_bias": False}))
    named = (
        r"has no place for 12 of the tensors: .*layers\.0\.self_attn\.k_proj\.bias, .*, \.\.\.; .* needs attention_bias"
    )
    with pytest.raises(ModelError, match=named):
        load(path)


def test_misshaped_tensor_is_named(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__norm__weight=torch.ones(47))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is \[47\], but config\.json makes it \[48\]"):
        load(path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    edit_weights(path, model__norm__weight=torch.ones(48, dtype=torch.int8))
    with pytest.raises(ModelError, match=r"model\.norm\.weight holds torch\.int8"):
        load(path)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_torn_weights_are_named(keep: int, tmp_path: Path) -> None:
    file = save_tiny_model(tmp_path, "llama") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: torn"):
        load(tmp_path)


def test_pickle_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"only as pickle \(pytorch_model\.bin\).*save_pretrained"):
        load(path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors"):
        load(path)


def test_shard_named_in_the_index_but_missing(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", max_shard_size="40KB")
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=rf"{victim.name}: named in model\.safetensors\.index\.json but not there"):
        load(path)


LONG_NAME = json.dumps({"weight_map": {"a": "é" * 5000}})


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": {"a": "../outside.safetensors"}}', LONG_NAME])
def test_broken_index_is_named(index: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama", max_shard_size="40KB")
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="index"):
        load(path)


def test_an_index_beside_a_whole_file_is_stale(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "llama")
    gone = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(gone))
    assert torch.equal(load(path).embed_weight, make_tiny_model("llama").model.embed_tokens.weight)


@pytest.mark.parametrize("units", [(), ("amx_tile",), ("avx512_bf16",)], ids=str)
def test_default_dtype_on_a_cpu_is_one_it_multiplies_natively(
    units: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for unit in ("amx_tile", "avx512_bf16"):
        monkeypatch.setattr(torch.cpu, f"_is_{unit}_supported", lambda has=unit in units: has)
    path = save_tiny_model(tmp_path, "llama")
    raw = json.loads((path / "config.json").read_text())
    by_name = {name: ModelConfig.from_dict(raw | {"dtype": name}) for name in ("float32", "float16", "bfloat16")}
    assert default_dtype(by_name["float32"], "cpu") == torch.float32
    assert default_dtype(by_name["float16"], "cpu") == torch.float32
    is_native = bool(units) and can_pack_bfloat16()  # torch packs it for AVX-512 without units too, and emulates them
    assert default_dtype(by_name["bfloat16"], "cpu") == (torch.bfloat16 if is_native else torch.float32)
    assert default_dtype(by_name["float16"], "cuda") == torch.float16


def test_a_float32_model_on_a_gpu_stays_so_and_the_log_says_what_is_faster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ModelConfig.from_dir(save_tiny_model(tmp_path, "llama"))
    assert default_dtype(config, "cpu") == torch.float32 and not caplog.messages
    assert default_dtype(config, "cuda") == torch.float32
    assert "set engine.dtype: bfloat16" in caplog.text
