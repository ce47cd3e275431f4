"""What Gemma 4 has, and in part 3n: layers that differ in their heads, share keys and are told of tokens anew."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bulkrun import ops
from bulkrun.errors import ModelError
from bulkrun.models.config.layer_kv import LayerKV
from bulkrun.models.config.model_config import DecoderConfig, ModelConfig
from bulkrun.models.config.rope import RopeConfig
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.decoder.invariant import InvariantModel
from bulkrun.models.kv_cache import KVCache, bytes_per_block
from tests.models.decoder.test_decoder import (
    check_wide_steps,
    load,
    random_tokens,
    transformers_logits,
    whole_prompt_logits,
)
from tests.models.load import load_model
from tests.models.paged_driver import make_metadata, tolerance_of
from tests.models.tiny_models import SMALL, known, make_tiny_model, save_published, save_tiny_model

if not known(["gemma4"]):
    pytest.skip("this version of transformers has no such model", allow_module_level=True)
FULL, SLIDING = "full_attention", "sliding_attention"
TOLERANCE = tolerance_of("gemma4")


def read(architecture: str = "Gemma4ForCausalLM", **keys: Any) -> DecoderConfig:
    config = ModelConfig.from_dict({**SMALL, "architectures": [architecture], "num_hidden_layers": 12, **keys})
    assert isinstance(config, DecoderConfig)
    return config


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("gemma4", {}),
        ("gemma4", {"num_kv_shared_layers": 0}),
        ("gemma4", {"global_head_dim": 16}),  # as the others
        ("gemma4", {"global_head_dim": 16, "num_kv_shared_layers": 0}),
        ("gemma4", {"use_double_wide_mlp": False, "final_logit_softcapping": None, "tie_word_embeddings": False}),
        ("gemma4", {"attention_bias": True, "attention_k_eq_v": True, "num_global_key_value_heads": 3}),
        ("gemma4", {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}),
        ("gemma4", {"layer_types": [FULL, *[SLIDING] * 4]}),  # the last one attends to everything all the same
        (
            "gemma4",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e4},
                    SLIDING: {"rope_type": "default", "rope_theta": 7e3},
                }
            },
        ),
        (
            "gemma4",
            {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 5e4} for kind in (FULL, SLIDING)}},
        ),
        ("gemma4_moe", {}),
        ("gemma4_moe", {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True}),
        ("gemma4_moe", {"top_k_experts": 5}),
        ("gemma4_unified", {"attention_k_eq_v": True, "use_bidirectional_attention": "vision"}),
        ("gemma4_unified", {"num_kv_shared_layers": 3, "use_double_wide_mlp": True}),
    ],
)
def test_published_keys_mean_what_they_mean_to_transformers(variant: str, keys: dict[str, Any], tmp_path: Path) -> None:
    """And so do those that transformers writes anew, by layer."""
    reference = save_published(tmp_path / "published", variant, **keys)
    reference.save_pretrained(tmp_path / "saved")
    published, saved = (ModelConfig.from_dir(tmp_path / name) for name in ("published", "saved"))
    assert published == saved
    tokens = random_tokens(60, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path / "published", dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def drawn_keys(seed: int) -> dict[str, Any]:
    """Any of the architecture: sizes that fill words and panels or not, layers alike or not, shared keys or none."""
    draw = random.Random(seed)
    is_whole = draw.random() < 0.6
    num_layers = draw.randint(2, 6)
    kinds = [draw.choice((FULL, SLIDING)) for _ in range(num_layers - 1)] + [FULL]
    num_shared = draw.choice((0, 1, 2)) if num_layers > 3 else 0
    if num_shared:
        kinds[:2] = (SLIDING, FULL)  # whose keys are there to be shared
    keys = {
        "hidden_size": 64 if is_whole else 48,
        "intermediate_size": 96 if is_whole else 72,
        "num_hidden_layers": num_layers,
        "num_attention_heads": draw.choice((2, 4, 6)),
        "num_key_value_heads": draw.choice((1, 2)),
        "head_dim": draw.choice((16, 32)),
        "global_head_dim": draw.choice((32, 64)),
        "layer_types": kinds,
        "num_kv_shared_layers": num_shared,
        "sliding_window": draw.choice((5, 40)),
        "use_double_wide_mlp": draw.random() < 0.5,
        "attention_k_eq_v": draw.random() < 0.4,
        "num_global_key_value_heads": draw.choice((None, 1, 2)),
        "hidden_size_per_layer_input": draw.choice((32, 64) if is_whole else (8, 24)),
    }
    if not num_shared and draw.random() < 0.3:
        keys["hidden_size_per_layer_input"] = 0
    # each token goes to all: of 300 some would have two that are as likely in float32
    experts = {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 3, "moe_intermediate_size": 24}
    return keys | (experts if draw.random() < 0.25 else {})


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("seed", range(16))
def test_any_layers_have_the_logits_of_transformers(seed: int, tmp_path: Path) -> None:
    check_wide_steps(tmp_path, "gemma4", seed, drawn_keys(seed))


def test_what_a_file_does_not_say_is_as_in_transformers() -> None:
    config = read()
    assert config.sliding_windows == (*[512] * 5, None) * 2
    assert config.layers_kv[4:6] == (LayerKV(2, 256, 4), LayerKV(2, 512, 5))
    assert config.layer_inputs == (256, 262_144)
    assert config.ropes[4] == RopeConfig(theta=10_000.0, head_dim=256)
    assert config.ropes[5] == RopeConfig(1_000_000.0, "proportional", 0.25, head_dim=512)
    unified = read("Gemma4UnifiedForCausalLM")
    assert unified.layer_inputs is None and unified.sliding_windows[0] == 1024


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vocab_size_per_layer_input": 99}, r"vocab_size_per_layer_input is 99, less than the vocabulary"),
        ({"hidden_size_per_layer_input": -8}, r"'hidden_size_per_layer_input' is -8, not a whole number above 0"),
        ({"use_bidirectional_attention": "all"}, r"use_bidirectional_attention makes this an encoder"),
        ({"attention_k_eq_v": True, "num_global_key_value_heads": 4}, r"6 query heads over 4 key heads of 512 dimen"),
        ({"global_head_dim": 33}, r"6 query heads over 2 key heads of 33 dimensions is not supported"),
        ({"num_kv_shared_layers": 11}, r"layer 5 is to share the keys of an earlier one of its kind, and there is non"),
        ({"layer_types": [SLIDING, FULL] * 4, "num_kv_shared_layers": 4}, r"'layer_types' has 8 values for 12 layers"),
        ({"layer_types": [SLIDING, "chunked"] * 6}, r"layer type 'chunked' is not supported"),
        ({"enable_moe_block": True}, r"'num_experts' is None, not a whole number above 0"),
    ],
)
def test_what_cannot_be_is_said(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read(**keys)


@pytest.mark.parametrize("variant", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_have_one_cache(variant: str, tmp_path: Path) -> None:
    config = load(tmp_path, variant).config
    assert [kv.source for kv in config.layers_kv] == [0, 1, 2, 2, 1]
    cache = KVCache.allocate(config, 4, 8, torch.float32, "cpu")
    assert cache.k[3] is cache.k[2] and cache.v[4] is cache.v[1] and cache.k[0] is not cache.k[2]
    assert bytes_per_block(config, 8, torch.float32) == sum(one[0].nbytes for one in (*cache.k[:3], *cache.v[:3]))


@pytest.mark.parametrize("variant", ["gemma3n", "gemma4"])
def test_files_may_have_keys_of_layers_that_share_them(variant: str, tmp_path: Path) -> None:
    """As the published ones do; nothing reads them."""
    path = save_tiny_model(tmp_path, variant)
    stored = load_file(path / "model.safetensors")
    attention = "model.layers.3.self_attn."
    unused = {f"{attention}{name}.weight": torch.ones(3) for name in ("k_proj", "v_proj", "k_norm", "v_norm")}
    save_file(stored | unused, path / "model.safetensors", {"format": "pt"})
    tokens = random_tokens(40, seed=2)
    ours = whole_prompt_logits(load_model(path, dtype=torch.float32, device="cpu"), tokens)
    torch.testing.assert_close(ours, transformers_logits(variant, tokens), atol=tolerance_of(variant), rtol=0)
    wrong = {"model.layers.2.self_attn.v_norm.weight": torch.ones(3)}
    save_file(stored | wrong, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no place for 1 of the tensors: model\.layers\.2\.self_attn\.v_norm"):
        load_model(path, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("variant", ["gemma3n", "gemma4"])
@pytest.mark.parametrize("shared", [0, 2])
@torch.inference_mode()
def test_prompt_tokens_end_where_no_layer_makes_keys_of_them(shared: int, variant: str, tmp_path: Path) -> None:
    """Behind it only those go on that are asked for, and they find what they would have found."""
    model = load(tmp_path, variant, num_kv_shared_layers=shared)
    tables, chunks = [[1, 2], [3], [4, 5]], [(20, 21), (0, 9), (0, 25)]
    seqs = [random_tokens(end, seed) for seed, (_, end) in enumerate(chunks)]
    cache = KVCache.allocate(model.config, 6, 16, torch.float32, "cpu")
    first = make_metadata([(0, 20)], tables[:1], 16, num_decode_seqs=0)
    model(torch.tensor(seqs[0][:20]), torch.arange(20), cache, first)
    seen: list[int] = []
    last = model.layers[4].attention
    last.register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
    ids = torch.tensor([token for seq, (start, end) in zip(seqs, chunks, strict=True) for token in seq[start:end]])
    positions = torch.tensor([position for chunk in chunks for position in range(*chunk)])

    def step(kept: list[int] | None) -> torch.Tensor:
        meta = make_metadata(chunks, tables, 16, num_decode_seqs=1)
        return model(ids, positions, cache, meta, None if kept is None else torch.tensor(kept, dtype=torch.int64))

    everything, last = step(None), [0, 9, 34]  # token of each
    assert len(everything) == 35
    for some in (last, [0, 3, 20, 21], [0, 33]):
        torch.testing.assert_close(step(some), everything[some], atol=2e-5, rtol=0)
    assert seen == ([35, 3, 4, 2] if shared else [35] * 4)
    assert step([]).shape == (0, 48)
    assert len(seen) == (4 if shared else 5), "in the middle of prompts nothing of theirs is computed there"


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_layers_in_one_call_end_prompts_there_too(deterministic: bool, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma4_whole_panels")
    model = load_model(path, dtype=torch.float32, device="cpu", deterministic=deterministic)
    decoder = model.model if isinstance(model, InvariantModel) else model
    if decoder.layer_stack is None:
        pytest.skip("this processor has no such compiled layers")
    assert decoder.layer_stack._stack.last_full == 2
    chunks = [(0, 9), (0, 300), (0, 40)]
    seqs = [random_tokens(end, seed) for seed, (_, end) in enumerate(chunks)]
    tables = [[1], [*range(2, 21)], [21, 22, 23]]
    ids, positions = (
        torch.tensor([token for seq in seqs for token in seq]),
        torch.cat([torch.arange(end) for _, end in chunks]),
    )

    def step(kept: list[int] | None) -> torch.Tensor:
        cache = KVCache.allocate(model.config, 24, 16, torch.float32, "cpu")
        meta = make_metadata(chunks, tables, 16, num_decode_seqs=0)
        return model(ids, positions, cache, meta, None if kept is None else torch.tensor(kept, dtype=torch.int64))

    everything = step(None)
    for tokens, hidden in zip(seqs, everything.split([len(seq) for seq in seqs]), strict=True):
        theirs = transformers_logits("gemma4_whole_panels", tokens)
        torch.testing.assert_close(model.compute_logits(hidden), theirs, atol=TOLERANCE, rtol=0)
    for kept in ([8, 308, 348], [308], [0, 7, 100, 101, 340]):
        torch.testing.assert_close(step(kept), everything[kept], atol=0 if deterministic else 2e-5, rtol=0)
    assert step([]).shape == (0, 64)


@pytest.mark.parametrize("variant", ["gemma3n", "gemma4", "gemma4_moe"])
def test_dummy_weights_keep_numbers_in_bounds(variant: str, tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, variant)
    (path / "model.safetensors").unlink()
    model = load_model(path, dtype=torch.float32, device="cpu", load_format="dummy")
    logits = whole_prompt_logits(model, random_tokens(30, seed=3))
    assert logits.isfinite().all() and logits.std() > 1e-3


def test_its_scalars_are_rounded_where_transformers_rounds_them() -> None:
    """The sum, its product with the layer's number, and nothing in between."""
    x, residual = torch.randn(2, 7, 48).bfloat16()
    weight, scale = torch.rand(48), torch.tensor([0.37]).bfloat16()
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6, scale)
    expected = x + residual
    expected *= scale
    assert torch.equal(total, expected)
    reference = make_tiny_model("gemma4").model.norm
    reference.weight.data = weight
    torch.testing.assert_close(normed, reference(expected), atol=0, rtol=8e-3)


def test_a_whole_model_beside_towers_leaves_them_alone(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "gemma4")
    stored = {name.replace("model.", "model.language_model."): tensor
              for name, tensor in load_file(path / "model.safetensors").items()}  # fmt: skip
    towers = ("vision_tower.encoder.x", "embed_vision.embedding_projection", "audio_tower.y", "embed_audio.z",
              "vision_embedder.patch_dense")  # fmt: skip
    stored |= {f"model.{tower}.weight": torch.ones(2, 2) for tower in towers}
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": raw}
    (path / "config.json").write_text(json.dumps(whole))
    model = load_model(path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder) and model.config.eos_token_ids == (2,)
    tokens = random_tokens(40, seed=2)
    torch.testing.assert_close(
        whole_prompt_logits(model, tokens), transformers_logits("gemma4", tokens), atol=TOLERANCE, rtol=0
    )
