"""The general path beside transformers' own attention, in float32; and everything it must refuse, by name."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bulkrun.errors import ModelError
from bulkrun.models.config import general_config, model_config
from bulkrun.models.config.families import FAMILIES
from bulkrun.models.config.general_config import TRIED
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.general.general_model import GeneralModel
from tests.models.load import load_model
from tests.models.paged_driver import assert_same_tokens, forced_logits
from tests.models.tiny_models import (
    GENERAL_VARIANTS,
    VARIANTS,
    VOCAB_SIZE,
    known,
    make_tiny_model,
    save_published,
    save_tiny_model,
)

SIZES = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}


def load(path: Path, *, load_format: str = "auto") -> GeneralModel:
    model = load_model(path, dtype=torch.float32, device="cpu", load_format=load_format)
    assert isinstance(model, GeneralModel)
    return model


def save_untrained(path: Path, architecture: str, **config: Any) -> Path:
    model_class = getattr(transformers, architecture)
    model_class(model_class.config_class(**(SIZES | config))).save_pretrained(path)
    return path


@pytest.mark.parametrize("variant", known(GENERAL_VARIANTS))
def test_paged_steps_of_a_mixed_batch_equal_transformers(variant: str, tmp_path: Path) -> None:
    prompt_lens, lens = [21, 1, 9], [40, 17, 30]
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in lens]
    paged = forced_logits(load(save_tiny_model(tmp_path, variant)), sequences, prompt_lens)
    reference = make_tiny_model(variant)
    for tokens, ours in zip(sequences, paged, strict=True):
        with torch.inference_mode():
            theirs = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
        assert_same_tokens(ours, theirs)


def test_what_is_called_tried_is_what_is_tried() -> None:
    tested = {architecture for architecture, _ in (VARIANTS | GENERAL_VARIANTS).values()}
    assert tested - set(FAMILIES) == set(TRIED)
    assert set(FAMILIES) <= tested


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("GPTNeoForCausalLM", {"attention_types": [[["global"], 2]]}),
        ("BloomForCausalLM", {"seq_length": 64}),
        ("MptForCausalLM", {}),
        ("DiffLlamaForCausalLM", {"intermediate_size": 32}),
    ],
)
def test_attention_that_cannot_be_exchanged_is_refused_by_name_and_would_be_found_out(
    architecture: str, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_untrained(tmp_path, architecture, **config)
    with pytest.raises(
        ModelError, match=rf"{architecture} is not supported: transformers cannot exchange its attention"
    ):
        ModelConfig.from_dir(path)
    monkeypatch.setattr(general_config, "_OWN_ATTENTION", ())
    with pytest.raises(ModelError, match=rf"{architecture} is not supported|key 'max_position_embeddings' is missing"):
        load(path)


@pytest.mark.parametrize("variant", known(["gpt2", "laguna", "phimoe", "opt"]))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_not_taken_for_an_error(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load_model(save_tiny_model(tmp_path, variant), dtype=dtype, device="cpu")
    assert isinstance(model, GeneralModel)
    expected = make_tiny_model(variant).to(dtype).state_dict()
    found = model.model.state_dict()
    assert {name: tensor.dtype for name, tensor in found.items()} == dict.fromkeys(expected, dtype)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_model_that_cannot_compute_in_float32_is_compared_in_half_precision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, "gpt2")
    forward = transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward

    def cast(self: Any, states: torch.Tensor) -> torch.Tensor:
        return forward(self, states.bfloat16())

    monkeypatch.setattr(transformers.models.gpt2.modeling_gpt2.GPT2MLP, "forward", cast)
    model = load_model(path, dtype=torch.bfloat16, device="cpu")
    assert isinstance(model, GeneralModel)
    assert {parameter.dtype for parameter in model.model.parameters()} == {torch.bfloat16}

    def shifted(self: Any, states: torch.Tensor) -> torch.Tensor:
        return cast(self, states + states.roll(1, dims=1))

    monkeypatch.setattr(transformers.models.gpt2.modeling_gpt2.GPT2MLP, "forward", shifted)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported: .* logits are off by"):
        load_model(path, dtype=torch.bfloat16, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["RobertaForCausalLM", "CamembertForCausalLM", "Data2VecTextForCausalLM"])
def test_positions_that_begin_behind_the_padding_are_refused(
    architecture: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    sizes = {"intermediate_size": 72, "max_position_embeddings": 128}
    path = save_untrained(tmp_path, architecture, is_decoder=True, **sizes)
    with pytest.raises(ModelError, match=rf"{architecture} is not supported: it counts positions from its padding"):
        load_model(path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_looks_at_its_neighbours_is_found_out(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, "gpt2")
    forward = transformers.models.gpt2.modeling_gpt2.GPT2MLP.forward

    def shifted(self: Any, states: torch.Tensor) -> torch.Tensor:
        return forward(self, states + 0.1 * states.roll(1, dims=1))

    monkeypatch.setattr(transformers.models.gpt2.modeling_gpt2.GPT2MLP, "forward", shifted)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported: .* logits are off by"):
        load_model(path, dtype=dtype, device="cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_encoders_are_refused_by_name_and_would_be_found_out(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 what a bidirectional attention changes can pass for rounding."""
    sizes = {"intermediate_size": 72, "max_position_embeddings": 128}
    path = save_untrained(tmp_path / "encoder", "BertLMHeadModel", **sizes)
    with pytest.raises(ModelError, match=r"BertLMHeadModel is not supported: an encoder unless .* is_decoder: true"):
        load_model(path, dtype=dtype, device="cpu")
    monkeypatch.setattr(general_config, "_ENCODERS", ())
    with pytest.raises(ModelError, match=r"BertLMHeadModel is not supported: its attention looks at later tokens"):
        load_model(path, dtype=dtype, device="cpu")
    decoder = save_untrained(tmp_path / "decoder", "BertLMHeadModel", is_decoder=True, **sizes)
    assert load_model(decoder, dtype=dtype, device="cpu").config.architecture == "BertLMHeadModel"


def test_a_window_of_which_nobody_says_where_it_holds_is_refused_unless_no_sequence_is_that_long(
    tmp_path: Path,
) -> None:
    save_published(tmp_path, "phimoe", sliding_window=512, max_position_embeddings=512)
    assert load(tmp_path).config.max_position_embeddings == 512
    save_published(tmp_path, "phimoe", sliding_window=511, max_position_embeddings=512)
    with pytest.raises(ModelError, match=r"PhimoeForCausalLM .* does not say where its sliding window of 511 holds"):
        load(tmp_path)


@pytest.mark.parametrize("variant", known(["mimo_v2_flash"]))
def test_published_keys_tell_the_heads_of_each_layer(variant: str, tmp_path: Path) -> None:
    """transformers writes them anew, by layer."""
    reference = save_published(tmp_path / "published", variant)
    reference.save_pretrained(tmp_path / "saved")
    published, saved = (ModelConfig.from_dir(tmp_path / name).layers_kv for name in ("published", "saved"))
    assert published == saved and len({kv[:2] for kv in saved}) > 1
    tokens = torch.arange(3, 60)
    (ours,) = forced_logits(load(tmp_path / "published"), [tokens.tolist()], [31])
    with torch.inference_mode():
        torch.testing.assert_close(ours, reference(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_a_model_that_makes_a_mask_of_its_own_is_refused_by_name_and_would_be_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"intermediate_size": 72, "num_key_value_heads": 2, "max_position_embeddings": 128}
    path = save_untrained(tmp_path, "DogeForCausalLM", **sizes)
    with pytest.raises(ModelError, match="DogeForCausalLM is not supported: transformers cannot exchange its att"):
        load(path)
    monkeypatch.setattr(general_config, "_OWN_ATTENTION", ())
    with pytest.raises(ModelError, match="DogeForCausalLM is not supported: its attention wants a mask of its own"):
        load(path)


def test_attention_in_chunks_is_refused_by_name_and_would_be_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Llama 4 would be, were it no family: it passes its chunks in masks alone, which a paged attention has no use
    for."""
    monkeypatch.setattr(model_config, "find_family", lambda raw: None)
    sizes = {"intermediate_size": 72, "intermediate_size_mlp": 72, "head_dim": 16, "num_key_value_heads": 2}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "pad_token_id": 0}
    path = save_untrained(tmp_path, "Llama4ForCausalLM", attention_chunk_size=32, **sizes, **experts)
    raw = json.loads((path / "config.json").read_text())
    del raw["layer_types"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"Llama4ForCausalLM is not supported: attention within chunks of 32 tokens"):
        load(path)
    del raw["attention_chunk_size"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"Llama4ForCausalLM .* does not tell its layers from its head"):
        load(path)


def test_errors_of_a_models_own_code_over_the_cache_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_model(tmp_path, "gpt2")
    body = transformers.GPT2Model
    forward = body.forward

    @functools.wraps(forward)
    def needs_a_mask(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.config._attn_implementation != "eager":
            raise AttributeError("no mask\nmore")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(body, "forward", needs_a_mask)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel .* fails over the paged cache \(AttributeError: no mask\)"):
        load(path)


@pytest.mark.parametrize("layer_idx", [None, 7])
def test_attention_layers_that_do_not_know_their_place_are_refused(
    layer_idx: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny_model(tmp_path, "gpt2")
    attention = transformers.models.gpt2.modeling_gpt2.GPT2Attention
    make = attention.__init__

    def make_elsewhere(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.layer_idx = layer_idx

    monkeypatch.setattr(attention, "__init__", make_elsewhere)
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel is not supported: its attention layers do not say which"):
        load(path)


def test_missing_tensors_are_not_filled_with_noise(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = save_tiny_model(tmp_path, "gpt2")
    tensors = load_file(path / "model.safetensors")
    save_file(
        {k: v for k, v in tensors.items() if "h.1.mlp.c_fc" not in k}, path / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(ModelError, match=r"missing keys: .*h\.1\.mlp\.c_fc"):
        load(path)


def test_code_in_the_checkpoint_is_never_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "modeling_evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    raw = {"architectures": ["EvilForCausalLM"], "model_type": "evil", "max_position_embeddings": 64, **SIZES}
    code = {"AutoConfig": "modeling_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"auto_map": code}))
    with pytest.raises(ModelError, match=r"EvilForCausalLM is not supported: transformers .* 'evil', and the code .*"):
        load(tmp_path, load_format="dummy")
    assert not marker.exists()


def test_an_architecture_that_transformers_does_not_have(tmp_path: Path) -> None:
    raw = {"architectures": ["NobodyForCausalLM"], "model_type": "nobody", "max_position_embeddings": 64, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=r"NobodyForCausalLM is not supported: transformers \S+ has no model type 'no"):
        load(tmp_path, load_format="dummy")


def test_pickle_weights_are_refused_here_too(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gpt2")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only as pickle"):
        load(path)


def test_dummy_weights_need_config_json_only_and_repeat(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "gpt_bigcode")
    (tmp_path / "model.safetensors").unlink()
    first, second = load(tmp_path, load_format="dummy"), load(tmp_path, load_format="dummy")
    for ours, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, other)


def test_sizes_under_the_names_of_older_architectures() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 96, "n_head": 6, "n_layer": 5, "n_positions": 77,
            "vocab_size": 31, "n_inner": None, "eos_token_id": 30}  # fmt: skip
    config = ModelConfig.from_dict(gpt2)
    assert not isinstance(config, DecoderConfig)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (5, 6, 6, 16)
    assert (config.hidden_size, config.intermediate_size, config.max_position_embeddings) == (96, 384, 77)
    bigcode = gpt2 | {"architectures": ["GPTBigCodeForCausalLM"]}
    assert ModelConfig.from_dict(bigcode | {"multi_query": True}).num_kv_heads == 1
    assert ModelConfig.from_dict(bigcode).num_kv_heads == 1, "what transformers takes it for"
    assert ModelConfig.from_dict(bigcode | {"multi_query": False}).num_kv_heads == 6
    with pytest.raises(ModelError, match="none of num_hidden_layers, n_layer"):
        ModelConfig.from_dict({key: value for key, value in gpt2.items() if key != "n_layer"})


def test_contexts_beyond_the_original_one_are_not_offered_where_longrope_would_change_every_key() -> None:
    raw = {"architectures": ["PhimoeForCausalLM"], "max_position_embeddings": 512, **SIZES}
    scaling = {"type": "longrope", "original_max_position_embeddings": 64}
    assert ModelConfig.from_dict(raw).max_position_embeddings == 512
    assert ModelConfig.from_dict(raw | {"rope_scaling": scaling}).max_position_embeddings == 64


def test_contexts_that_other_keys_give() -> None:
    raw = {"architectures": ["PersimmonForCausalLM"], "max_position_embeddings": 512, **SIZES}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert ModelConfig.from_dict(raw | {"rope_scaling": yarn}).max_position_embeddings == 1024
    assert ModelConfig.from_dict(raw | {"model_max_length": 4096}).max_position_embeddings == 512
    for name in ("CohereForCausalLM", "Cohere2ForCausalLM", "Cohere2MoeForCausalLM"):
        command = raw | {"architectures": [name], "model_max_length": 4096, "intermediate_size": 96}
        assert ModelConfig.from_dict(command).max_position_embeddings == 4096
        assert ModelConfig.from_dict(command | {"model_max_length": None}).max_position_embeddings == 512
