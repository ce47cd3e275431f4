"""Adapters added as weights are read: logits are PEFT's over the unmerged model, whatever the adapter changes."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from bulkrun.errors import ModelError
from bulkrun.models.config.adapter_fit import check_adapter
from bulkrun.models.loading import adapter as adapter_module
from bulkrun.models.loading.adapter import Adapter
from tests.models.load import load_model
from tests.models.paged_driver import forced_logits
from tests.models.tiny_adapters import QKV, save_adapter
from tests.models.tiny_models import VOCAB_SIZE, make_tiny_model, save_tiny_model
from tests.models.tiny_text_parts import save_text_part

LATENT = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ALL = {"target_modules": "all-linear"}
TEXTS = [[3, 17, 99, 4, 56, 101, 7, 22, 81], [5, 9, 13, 60]]


def logits(path: Path, adapter: Path | None, **settings: Any) -> list[torch.Tensor]:
    """Ours [len, V] of each text."""
    settings = {"dtype": torch.float32, "device": "cpu"} | settings
    model = load_model(path, adapter=Adapter.of(adapter), **settings)
    check_adapter(adapter, path)  # what can be added is not refused before
    return forced_logits(model, TEXTS, [len(text) for text in TEXTS])


@torch.no_grad()
def expected(model: Any) -> list[torch.Tensor]:
    """PEFT's logits [len, V] of each text, its adapter beside the weights."""
    return [model(input_ids=torch.tensor([text])).logits[0].float() for text in TEXTS]


def assert_close(ours: list[torch.Tensor], theirs: list[torch.Tensor], share: float = 1e-5) -> None:
    largest = max(float(one.abs().max()) for one in theirs)
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < share * largest


@pytest.mark.parametrize(
    ("variant", "lora"),
    [
        ("llama", ALL),
        ("llama_biases", ALL | {"bias": "lora_only"}),
        ("qwen3", {"target_modules": QKV, "use_rslora": True}),
        ("qwen3", {"target_modules": QKV, "rank_pattern": {"layers.1.self_attn.q_proj": 9, "v_proj": 2},
                   "alpha_pattern": {"k_proj": 30, r"layers\.[02]\.self_attn\.v_proj": 3}}),
        ("llama", ALL | {"use_dora": True}),
        ("llama_tied", ALL),
        ("llama", {"target_modules": ["embed_tokens", "o_proj"]}),
        ("llama", {"target_modules": ["lm_head", "down_proj"]}),
        ("llama_tied", {"target_modules": ["embed_tokens"]}),  # the head stays
        ("llama", {"target_modules": QKV, "modules_to_save": ["embed_tokens", "lm_head", "input_layernorm", "norm"]}),
        ("gemma3", {"target_modules": QKV, "modules_to_save": ["input_layernorm"]}),  # norms with an offset
        ("gemma3", ALL),
        ("gemma3n", ALL | {"modules_to_save": ["post_laurel_norm", "router_norm"]}),
        ("gemma3n", {"target_modules": ["altup_projections.1", "prediction_coefs", "linear_left"]}),
        ("gemma4", ALL | {"modules_to_save": ["post_per_layer_input_norm"]}),
        ("gemma4_moe", {"target_modules": [*QKV, "gate_proj"], "use_dora": True}),
        ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
        ("olmo2", ALL),
        ("glm4", {"target_modules": [*QKV, "gate_up_proj"],  # patterns end where names do, and begin at a point
                  "alpha_pattern": {"up_proj": 90, "mlp.gate": 70}}),
        ("ernie4_5_biases", ALL | {"bias": "lora_only", "use_dora": True}),
        ("olmoe", {"target_modules": QKV}),
        ("granite", ALL),
        ("mixtral", {"target_modules": QKV}),
        ("qwen3_5", {"target_modules": [*QKV, "in_proj_qkv", "in_proj_z", "in_proj_b", "out_proj", "down_proj"]}),
        ("qwen3_5_moe", {"target_modules": [*QKV, "shared_expert.up_proj", "out_proj"]}),
        ("lfm2", {"target_modules": ["q_proj", "w1", "in_proj", "out_proj"]}),  # of attention and of convolutions
        ("granite_h", {"target_modules": ["q_proj", "in_proj", "out_proj", "input_linear", "output_linear"]}),
        ("falcon_h1", {"target_modules": [*QKV, "in_proj", "gate_proj"]}),
        ("hunyuan", {"target_modules": QKV, "modules_to_save": ["query_layernorm", "key_layernorm"]}),
        ("olmo_hybrid", {"target_modules": [*QKV, "g_proj", "a_proj", "o_proj", "down_proj"]}),
        ("cohere_qk_norm", ALL | {"modules_to_save": ["q_norm", "k_norm", "input_layernorm"]}),
        ("apertus", {"target_modules": [*QKV, "up_proj", "down_proj"]}),
        ("gpt_neox", {"target_modules": ["query_key_value", "dense", "dense_h_to_4h"]}),
        ("falcon_new", {"target_modules": ["query_key_value", "dense_4h_to_h"], "modules_to_save": ["ln_attn"]}),
        ("codegen", {"target_modules": ["qkv_proj", "out_proj", "fc_in"], "use_dora": True}),
        ("phi", {"target_modules": [*QKV, "dense", "fc2"], "modules_to_save": ["input_layernorm", "lm_head"]}),
        ("kimi_linear", {"target_modules": ["f_a_proj", "f_b_proj", "o_proj"]}),  # modules deeper than names of tensors
        ("nanochat", {"target_modules": [*QKV, "o_proj", "fc1"], "use_dora": True}),
        ("stablelm_beside", ALL | {"modules_to_save": ["q_layernorm"]}),
        ("afmoe", {"target_modules": [*QKV, "o_proj"]}),
        ("hunyuan_moe", {"target_modules": [*QKV, "o_proj"]}),
        ("llama4_maverick", {"target_modules": [*QKV, "o_proj", "shared_expert.up_proj", "down_proj"]}),
        ("nemotron_h", {"target_modules": ["q_proj", "in_proj", "up_proj"]}),
        ("deepseek_v3", {"target_modules": [*LATENT, "q_a_proj", "q_b_proj"], "modules_to_save": ["kv_a_layernorm"]}),
        ("moonlight", {"target_modules": [*LATENT, "q_proj"], "use_dora": True}),
        ("qwen3_next", {"target_modules": [*QKV, "in_proj_qkvz", "in_proj_ba"], "use_dora": True}),
    ],
)  # fmt: skip
def test_logits_are_pefts(variant: str, lora: dict[str, Any], tmp_path: Path) -> None:
    path, base = save_tiny_model(tmp_path / "base", variant), make_tiny_model(variant)
    plain = expected(base)
    theirs = expected(save_adapter(tmp_path / "adapter", base, **lora))
    with pytest.raises(AssertionError):
        assert_close(theirs, plain, 0.01)  # it changes something
    # float64 is as far from PEFT's as from ours there
    share = 1e-4 if variant.startswith("qwen3_5") else 1e-5
    assert_close(logits(path, tmp_path / "adapter"), theirs, share)
    assert_close(logits(path, None), plain, share)


def test_experts_one_by_one_take_adapters_of_the_hubs_names(tmp_path: Path) -> None:
    """Written by hand: transformers 5, and with it PEFT, has no single experts any more."""
    path = save_tiny_model(tmp_path / "base", "qwen3_moe")
    weights = load_file(path / "model.safetensors")
    name = next(name for name in weights if re.search(r"layers\.0\.mlp\.experts\.2\.up_proj", name))
    left, right = torch.randn(len(weights[name]), 3), torch.randn(3, weights[name].shape[1])
    write_adapter(tmp_path / "adapter", name.removesuffix(".weight"), right, left, alpha=6)
    ours = logits(path, tmp_path / "adapter")
    weights[name] += 6 / 3 * left @ right
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    assert_close(ours, logits(path, None))


def write_adapter(path: Path, module: str, a: torch.Tensor, b: torch.Tensor, **keys: Any) -> None:
    """An adapter of one module; `alpha` is lora_alpha, other keys as in adapter_config.json."""
    path.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "r": len(a), "lora_alpha": keys.pop("alpha", 4), **keys}
    (path / "adapter_config.json").write_text(json.dumps(config))
    names = {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
    save_file(names, path / "adapter_model.safetensors")


def test_the_head_may_change_where_it_was_the_embedding(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "llama_tied")
    a, b = torch.randn(2, 48), torch.randn(VOCAB_SIZE, 2)
    write_adapter(tmp_path / "adapter", "lm_head", a, b, alpha=2)
    apart = make_tiny_model("llama_tied")
    apart.lm_head.weight = torch.nn.Parameter(apart.lm_head.weight + b @ a)
    assert_close(logits(path, tmp_path / "adapter"), expected(apart))


def save_grown(folder: Path, variant: str, **lora: Any) -> tuple[Path, Any]:
    """A base and, beside it, an adapter that was trained with three tokens more; that one on its base is returned."""
    path, base = save_tiny_model(folder / "base", variant), make_tiny_model(variant)
    base.resize_token_embeddings(VOCAB_SIZE + 3, mean_resizing=False)
    base.name_or_path = str(path)  # as after `from_pretrained`: PEFT sees that the vocabulary is another, and saves it
    return path, save_adapter(folder / "adapter", base, **lora)


@pytest.mark.parametrize(
    ("variant", "lora"),
    [
        ("llama", {"target_modules": QKV}),
        ("llama_tied", {"target_modules": QKV}),
        ("gemma3", {"target_modules": QKV}),
        ("llama", {"target_modules": QKV, "modules_to_save": ["embed_tokens", "lm_head"]}),  # PEFT saves them thrice
        ("llama_tied", {"target_modules": QKV, "modules_to_save": ["embed_tokens"]}),
        ("llama_tied", {"target_modules": QKV, "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head"]}),
        ("llama_tied", {"target_modules": ["embed_tokens", "q_proj"]}),  # the head is what the embedding was
        ("llama_tied", {"target_modules": ["lm_head", "q_proj"]}),
        ("gemma3", {"target_modules": ["embed_tokens"]}),
        ("phi", {"target_modules": QKV, "modules_to_save": ["embed_tokens", "lm_head"]}),  # heads with a bias
        ("gptj", {"target_modules": QKV, "modules_to_save": ["wte", "lm_head"]}),
    ],
)
def test_a_vocabulary_that_grew_in_training_is_the_models(variant: str, lora: dict[str, Any], tmp_path: Path) -> None:
    path, model = save_grown(tmp_path, variant, **lora)
    loaded = load_model(path, adapter=Adapter.of(tmp_path / "adapter"), dtype=torch.float32, device="cpu")
    assert loaded.config.vocab_size == VOCAB_SIZE + 3
    text = [3, VOCAB_SIZE + 2, 17, VOCAB_SIZE]
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor([text])).logits[0]
    assert_close(forced_logits(loaded, [text], [len(text)]), [theirs])


def test_half_of_a_vocabulary_that_grew_is_not_enough(tmp_path: Path) -> None:
    """PEFT saves neither an embedding nor a head that nothing is added to where the other one is a target."""
    for target, lacking in (("embed_tokens", r"lm_head\.weight"), ("lm_head", r"model\.embed_tokens\.weight")):
        path, _ = save_grown(tmp_path / target, "llama", target_modules=[target])
        with pytest.raises(ModelError, match=rf"adapter: its vocabulary has 134 tokens, and it lacks {lacking}"):
            logits(path, tmp_path / target / "adapter")


def projections(path: Path, adapter: Path | None) -> torch.Tensor:
    """All of a model's in bfloat16, one behind the other."""
    model = load_model(path, adapter=Adapter.of(adapter), dtype=torch.bfloat16, device="cpu")
    weights = [weight for name, weight in model.named_parameters() if "_proj" in name]
    return torch.cat([(weight.to_dense() if weight.is_mkldnn else weight).flatten() for weight in weights])


def test_a_sum_is_rounded_once(tmp_path: Path) -> None:
    """Weights are those of PEFT's float32 merge, rounded; of those rounded before and after a quarter are others."""
    path = save_tiny_model(tmp_path / "base", "llama")
    merged = save_adapter(tmp_path / "adapter", make_tiny_model("llama"), **ALL).merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    ours, theirs = projections(path, tmp_path / "adapter"), projections(tmp_path / "merged", None)
    assert float((ours != theirs).float().mean()) < 0.001


def test_rows_that_are_worked_on_together_are_of_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_module, "_PIECE_NUMBERS", 7 * 48)  # of matrices with more rows
    path, base = save_tiny_model(tmp_path / "base", "llama"), make_tiny_model("llama")
    theirs = expected(save_adapter(tmp_path / "adapter", base, **ALL, use_dora=True))
    assert_close(logits(path, tmp_path / "adapter"), theirs)


@pytest.mark.parametrize("settings", [{"quantization": "int8"}, {"deterministic": True}], ids=str)
def test_the_sum_may_be_quantized_and_deterministic(settings: dict[str, Any], tmp_path: Path) -> None:
    path, base = save_tiny_model(tmp_path / "base", "llama_whole_panels"), make_tiny_model("llama_whole_panels")
    save_adapter(tmp_path / "adapter", base, **ALL).merge_and_unload().save_pretrained(tmp_path / "merged")
    ours = logits(path, tmp_path / "adapter", **settings)
    assert_close(ours, logits(tmp_path / "merged", None, **settings))


def test_a_checkpoint_in_bfloat16_gets_a_float32_sum_for_a_float32_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "llama", dtype=torch.bfloat16)
    base = make_tiny_model("llama")
    for parameter in base.parameters():
        parameter.data = parameter.to(torch.bfloat16).float()
    theirs = expected(save_adapter(tmp_path / "adapter", base, **ALL))
    assert_close(logits(path, tmp_path / "adapter"), theirs)


@pytest.mark.gpu
def test_on_a_gpu_the_sums_are_a_cpus(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "qwen3")
    save_adapter(tmp_path / "adapter", make_tiny_model("qwen3"), **ALL, use_dora=True)
    settings = {"dtype": torch.float32, "adapter": Adapter.of(tmp_path / "adapter")}
    on_gpu, on_cpu = (load_model(path, device=device, **settings) for device in ("cuda", "cpu"))
    theirs = dict(on_cpu.named_parameters())
    for name, parameter in on_gpu.named_parameters():
        torch.testing.assert_close(parameter.cpu(), theirs[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("variant", "lora", "keys"),
    [
        ("gpt2", {"target_modules": ["c_attn", "c_fc"]}, {}),
        ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}, {"tie_word_embeddings": True}),
        ("persimmon", ALL, {}),
    ],
)
def test_models_of_the_general_path_are_changed_too(
    variant: str, lora: dict[str, Any], keys: dict[str, Any], tmp_path: Path
) -> None:
    """A head that was the embedding stays as it was."""
    path, base = save_tiny_model(tmp_path / "base", variant, **keys), make_tiny_model(variant, **keys)
    theirs = expected(save_adapter(tmp_path / "adapter", base, **lora))
    assert_close(logits(path, tmp_path / "adapter"), theirs)


@pytest.mark.parametrize("name", ["gemma4", "qwen3_vl"])
def test_text_parts_take_adapters_that_were_trained_on_the_whole_model(name: str, tmp_path: Path) -> None:
    base = save_text_part(tmp_path / "base", name)
    lora = {"target_modules": r".*language_model.*\.(q_proj|o_proj|down_proj)"}
    theirs = expected(save_adapter(tmp_path / "adapter", base, **lora))
    assert_close(logits(tmp_path / "base", tmp_path / "adapter"), theirs)


def test_a_model_of_the_general_path_is_not_blamed_for_another_ones_adapter(tmp_path: Path) -> None:
    path, adapter = save_tiny_model(tmp_path / "base", "gpt2"), tmp_path / "adapter"
    write_adapter(adapter, "model.layers.0.self_attn.q_proj", torch.ones(2, 48), torch.ones(48, 2))
    with pytest.raises(ModelError, match=rf"^{adapter}: it changes model\.layers\.0\.self_attn\.q_proj\.weight, which"):
        logits(path, adapter)


def test_how_a_weight_lies_is_told_by_the_module(tmp_path: Path) -> None:
    """PEFT writes one `fan_in_fan_out` for all modules, that of the last: of a square one no shape would tell."""
    for variant, lora, written in (
        ("gpt2", {"target_modules": ["c_proj", "lm_head"]}, False),
        ("llama", {"target_modules": ["q_proj", "o_proj"]}, True),
    ):
        path, base = save_tiny_model(tmp_path / variant, variant), make_tiny_model(variant)
        adapter = tmp_path / f"{variant}_adapter"
        theirs = expected(save_adapter(adapter, base, **lora))
        edit_config(adapter, fan_in_fan_out=written)
        assert_close(logits(path, adapter), theirs)
    save_adapter(adapter, make_tiny_model("gpt2"), target_modules=["c_proj"], use_dora=True)
    with pytest.raises(ModelError, match=r"use_dora on .*c_proj\.weight, which lies transposed, is not supported"):
        logits(tmp_path / "gpt2", adapter)


def edit_config(adapter: Path, **keys: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def test_a_body_trained_alone_fits_the_whole_model(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "qwen3")
    whole = make_tiny_model("qwen3")
    save_adapter(tmp_path / "adapter", whole.model, **{"target_modules": QKV})  # changes `whole` where it is
    assert_close(logits(path, tmp_path / "adapter"), expected(whole))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("peft_type", "IA3", "peft_type 'IA3' is not supported, only LORA"),
        ("use_qalora", True, "use_qalora: not supported; merge"),
        ("target_parameters", ["mlp.experts.gate_up_proj"], "target_parameters: not supported"),
        ("init_lora_weights", "pissa", "init_lora_weights 'pissa': not supported"),
        ("init_lora_weights", "x" * 10**6, r"init_lora_weights 'x{56}\.\.\.: not supported"),
        ("peft_type", json.loads("[" * 900 + "]" * 900), r"peft_type \[{57}\.\.\. is not supported"),
        ("lora_alpha", "many", "lora_alpha: 'many' is not a number to multiply with"),
        ("lora_alpha", None, "lora_alpha: None is not a number"),
        ("lora_alpha", float("nan"), "lora_alpha: nan is not a number"),
        ("lora_alpha", float("-inf"), "lora_alpha: -inf is not a number"),
        ("lora_alpha", 10**400, r"lora_alpha: 10{56}\.\.\. is not a number"),
        ("alpha_pattern", {"q_proj": "3"}, "alpha_pattern: '3' is not a number"),
        ("alpha_pattern", ["q_proj"], "a value is of another kind"),
        ("alpha_pattern", {"(": 3}, r"alpha_pattern: '\(' is no regular expression"),
        ("alpha_pattern", {"(" * 5000 + ")" * 5000: 3}, r"alpha_pattern: '\({56}\.\.\. is no regular expression"),
        ("rank_pattern", {"a{99999999999999999999}": 3}, "rank_pattern: .* is no regular expression"),
        ("use_rslora", "false", "use_rslora: 'false' is neither true nor false"),
        ("r", 16, r"adapter_model\.safetensors: the tensors of .*q_proj are of rank 2, and by r or rank_pattern"),
        ("rank_pattern", {"layers.0.self_attn.q_proj": 4}, "are of rank 2, and by r or rank_pattern"),
        ("use_dora", True, "the tensors of model.layers.0.self_attn.q_proj do not go together"),
    ],
)
def test_what_cannot_be_added_is_named(key: str, value: Any, message: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "llama")
    write_adapter(tmp_path / "a", "model.layers.0.self_attn.q_proj", torch.ones(2, 48), torch.ones(48, 2))
    edit_config(tmp_path / "a", **{key: value})
    with pytest.raises(ModelError, match=message) as caught:
        logits(path, tmp_path / "a")
    assert "adapter_" in str(caught.value)  # the file


# what adapter_config.json says of training, of the tensors that there are, or of a sum that is worked out here
ADDED = {
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "modules_to_save", "peft_version", "qalora_group_size",
    "revision", "runtime_config", "target_modules", "task_type",
    "alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_dora", "use_rslora",
}  # fmt: skip


@pytest.mark.parametrize("key", sorted({field.name for field in dataclasses.fields(peft.LoraConfig)} - ADDED))
def test_every_other_key_of_pefts_makes_another_sum_and_is_refused(key: str, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", "model.layers.0.self_attn.q_proj", torch.ones(2, 48), torch.ones(48, 2))
    edit_config(tmp_path / "a", **{key: {"any": 1}})
    with pytest.raises(ModelError, match=rf"{key}: not supported; merge"):
        Adapter.of(tmp_path / "a")


def of_headers(path: Path, adapter: Path) -> None:
    """What `logits` finds when it reads weights, found before."""
    check_adapter(adapter, path)


@pytest.mark.parametrize("ask", [logits, of_headers])
def test_an_adapter_of_another_model_is_named(ask: Callable[[Path, Path], object], tmp_path: Path) -> None:
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    keys = {"base_model_name_or_path": "acme/large"}
    write_adapter(adapter, "model.layers.7.self_attn.q_proj", torch.ones(2, 48), torch.ones(48, 2), **keys)
    with pytest.raises(
        ModelError, match=r"layers\.7\.self_attn\.q_proj\.weight, which the model does not have.*acme/large"
    ):
        ask(path, adapter)
    write_adapter(adapter, "model.layers.1.self_attn.q_proj", torch.ones(2, 64), torch.ones(48, 2), **keys)
    with pytest.raises(ModelError, match=r"is \[48, 64\], the model's \[48, 48\].*acme/large"):
        ask(path, adapter)


def test_files_that_are_missing_or_torn_are_named(tmp_path: Path) -> None:
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    with pytest.raises(ModelError, match=r"no adapter_config\.json; engine\.adapter is"):
        logits(path, path)
    write_adapter(adapter, "lm_head", torch.ones(2, 48), torch.ones(VOCAB_SIZE, 2))
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="adapter_model"):
        logits(path, adapter)
    weights.unlink()
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        logits(path, adapter)
    (adapter / "adapter_model.bin").touch()
    with pytest.raises(ModelError, match=r"only adapter_model\.bin, a pickle"):
        logits(path, adapter)


def test_tensors_of_an_unknown_kind_are_named(tmp_path: Path) -> None:
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    write_adapter(adapter, "lm_head", torch.ones(2, 48), torch.ones(VOCAB_SIZE, 2))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name in ("model.embed_tokens.token_adapter.trainable_tokens_delta", "lm_head.lora_diag"):
        save_file(tensors | {f"base_model.model.{name}": torch.ones(2)}, adapter / "adapter_model.safetensors")
        with pytest.raises(ModelError, match=f"tensor {name} is of no kind of LoRA"):
            logits(path, adapter)


def test_what_changes_nothing_is_refused(tmp_path: Path) -> None:
    """The answers would be the base model's, under the adapter's name."""
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    write_adapter(adapter, "model.vision_tower.layers.0.q_proj", torch.ones(2, 48), torch.ones(48, 2))
    with pytest.raises(ModelError, match="all that it changes is beside the text model"):
        logits(path, adapter)
    save_file({}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: holds no tensors"):
        logits(path, adapter)


def test_matrices_without_a_rank_are_refused(tmp_path: Path) -> None:
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    write_adapter(adapter, "lm_head", torch.ones(0, 48), torch.ones(VOCAB_SIZE, 0))
    with pytest.raises(ModelError, match=r"tensors of lm_head do not go together \(A \[0, 48\]"):
        logits(path, adapter)


def test_whole_numbers_are_refused(tmp_path: Path) -> None:
    """Of a quantized adapter: what they stand for nobody says."""
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    write_adapter(adapter, "lm_head", torch.ones(2, 48, dtype=torch.int8), torch.ones(VOCAB_SIZE, 2))
    with pytest.raises(
        ModelError, match=r"tensor base_model\.model\.lm_head\.lora_A\.weight holds torch\.int8; adapters"
    ):
        logits(path, adapter)


def test_two_changes_of_one_weight_are_refused(tmp_path: Path) -> None:
    path, adapter = save_tiny_model(tmp_path / "base", "llama"), tmp_path / "adapter"
    a, b = torch.ones(2, 48), torch.ones(48, 2)
    write_adapter(adapter, "model.layers.0.self_attn.q_proj", a, b)
    file = adapter / "adapter_model.safetensors"
    other = {f"base_model.model.layers.0.self_attn.q_proj.lora_{x}.weight": part for x, part in (("A", a), ("B", b))}
    save_file(load_file(file) | other, file)
    with pytest.raises(ModelError, match=r"adapter: it changes model\.layers\.0\.self_attn\.q_proj\.weight twice"):
        logits(path, adapter)


def test_magnitudes_of_an_embedding_are_refused(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "llama")
    save_adapter(tmp_path / "adapter", make_tiny_model("llama"), use_dora=True, target_modules=["embed_tokens"])
    with pytest.raises(
        ModelError, match=r"use_dora on model\.embed_tokens, an embedding, is not .*; merge the adapter"
    ):
        logits(path, tmp_path / "adapter")


@pytest.mark.parametrize("ask", [logits, of_headers])
def test_weights_that_are_stored_quantized_take_no_adapter(ask: Callable[[Path, Path], object], tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path / "base", "llama")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    (path / "config.json").write_text(json.dumps(config))
    write_adapter(tmp_path / "adapter", "lm_head", torch.ones(2, 48), torch.ones(VOCAB_SIZE, 2))
    with pytest.raises(ModelError, match=r"engine\.adapter: the model's weights are stored quantized"):
        ask(path, tmp_path / "adapter")
