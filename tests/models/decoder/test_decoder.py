"""The decoder beside transformers, in float32: whole prompts, and step by step through a shuffled paged cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.kv_cache import KVCache
from tests.models.load import load_model
from tests.models.paged_driver import allocate_states, assert_same_tokens, forced_logits, make_metadata, tolerance_of
from tests.models.tiny_models import VARIANTS, VOCAB_SIZE, make_tiny_model, save_published, save_tiny_model

TOLERANCE = tolerance_of("llama")
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def load(tmp_path: Path, variant: str, dtype: torch.dtype = torch.float32, **overrides: object) -> Decoder:
    return load_model(save_tiny_model(tmp_path / variant, variant, **overrides), dtype=dtype, device="cpu")


@torch.inference_mode()
def transformers_logits(variant: str, tokens: list[int], **overrides: object) -> torch.Tensor:
    return make_tiny_model(variant, **overrides)(torch.tensor([tokens])).logits[0]


@torch.inference_mode()
def whole_prompt_logits(model: Decoder, tokens: list[int], block_size: int = 16) -> torch.Tensor:
    table = list(range(1, 2 + len(tokens) // block_size))
    cache = KVCache.allocate(model.config, len(table) + 1, block_size, model.dtype, "cpu")
    allocate_states(model, cache, 1)
    meta = make_metadata([(0, len(tokens))], [table], block_size, num_decode_seqs=0)
    return model.compute_logits(model(torch.tensor(tokens), torch.arange(len(tokens)), cache, meta))


def check_wide_steps(path: Path, variant: str, seed: int, keys: dict[str, Any]) -> None:
    """Logits of prompts and of steps behind them: wide enough for threads to have rows of their own."""
    model, sequences = load(path, variant, **keys), [random_tokens(length, seed) for length in (300, 41)]
    for tokens, ours in zip(sequences, forced_logits(model, sequences, [290, 20]), strict=True):
        theirs = transformers_logits(variant, tokens, **keys)
        torch.testing.assert_close(ours, theirs, atol=tolerance_of(variant), rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_whole_prompt_logits_equal_transformers(variant: str, tmp_path: Path) -> None:
    tokens = random_tokens(77, seed=1)
    ours, theirs = whole_prompt_logits(load(tmp_path, variant), tokens), transformers_logits(variant, tokens)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=tolerance_of(variant), rtol=0)
    assert_same_tokens(ours, theirs)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "granite"])
@torch.inference_mode()
def test_logits_as_computed_have_the_values_of_float32_ones(variant: str, tmp_path: Path) -> None:
    """Soft caps and divisors are computed in float32, so such logits cannot stay as the head computed them."""
    model = load(tmp_path, variant, torch.bfloat16)
    hidden_SE = torch.randn(5, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits_SV = model.compute_logits(hidden_SE, as_computed=True)
    assert logits_SV.dtype == (torch.bfloat16 if variant == "llama" else torch.float32)
    assert torch.equal(logits_SV.float(), model.compute_logits(hidden_SE))


@pytest.mark.parametrize("variant", VARIANTS)
def test_paged_steps_of_a_mixed_batch_equal_transformers(variant: str, tmp_path: Path) -> None:
    prompt_lens, lens = [41, 1, 17, 64, 9], [60, 23, 17, 81, 30]
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lens)]
    paged = forced_logits(load(tmp_path, variant), sequences, prompt_lens)
    for tokens, ours in zip(sequences, paged, strict=True):
        theirs, tolerance = transformers_logits(variant, tokens), tolerance_of(variant)
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
        torch.testing.assert_close(ours.log_softmax(-1), theirs.log_softmax(-1), atol=tolerance, rtol=0)
        assert_same_tokens(ours, theirs)


NESTED_ROPE = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 7e3},
}
FLAT_ROPE = {"rope_type": "llama3", "rope_theta": 5e4, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("variant", "parameters", "scaling"),
    [
        ("qwen3", FLAT_ROPE, YARN | {"rope_theta": 3e4}),
        ("llama", FLAT_ROPE, {"type": "linear", "factor": 4.0, "rope_theta": 5e4}),
        ("llama", YARN | {"attention_factor": 0.7, "rope_theta": 5e4}, YARN | {"rope_theta": 5e4}),
        ("gemma3", NESTED_ROPE, {"rope_type": "linear", "factor": 8.0}),
        ("olmo3", NESTED_ROPE, YARN),
        ("olmo3", NESTED_ROPE | {"full_attention": YARN | {"rope_theta": 5e4}}, {"factor": 2.0}),
    ],
)
def test_scaling_added_to_the_keys_of_transformers_5_counts(
    variant: str, parameters: dict[str, object], scaling: dict[str, object], tmp_path: Path
) -> None:
    reference = save_published(tmp_path, variant, rope_parameters=parameters, rope_scaling=scaling)
    tokens = random_tokens(200, seed=5)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("variant", "meant", "written"),
    [
        (
            "olmo3",
            {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in NESTED_ROPE},
            {"rope_theta": 1e4},
        ),
        (
            "llama",
            YARN | {"rope_theta": 5e5},
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "rope_scaling": YARN},
        ),
        (
            "llama",
            YARN | {"rope_theta": 5e5},
            {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": YARN, "rope_theta": 1e4},
        ),
    ],
)
def test_base_frequencies_that_transformers_forgets_are_the_models(
    variant: str, meant: dict[str, object], written: dict[str, object], tmp_path: Path
) -> None:
    """The reference is told what is meant, in keys that leave nothing open; see `rope` and `model_config`."""
    reference = save_published(tmp_path, variant, rope_parameters=meant)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(raw | written))
    tokens = random_tokens(200, seed=8)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("mistral_sliding", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("gemma3", {"attn_logit_softcapping": 1.0}),
    ],
)
def test_keys_that_transformers_reads_otherwise_than_the_family_seems_to(
    variant: str, keys: dict[str, object], tmp_path: Path
) -> None:
    """A Mistral with layer types is a Ministral to it, and Gemma 3 has no soft-cap in its attention."""
    reference = save_published(tmp_path, variant, **keys)
    tokens = random_tokens(60, seed=9)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


PUBLISHED_GPT_OSS = {
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
    "rope_theta": 150000,
    "initial_context_length": 64,
    "experts_per_token": 2,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}


@pytest.mark.parametrize("keys", [PUBLISHED_GPT_OSS, {}, {"rope_parameters": FLAT_ROPE}])
def test_gpt_oss_as_published_and_with_what_its_file_leaves_open(keys: dict[str, object], tmp_path: Path) -> None:
    reference = save_published(tmp_path, "gpt_oss", **keys)
    tokens = random_tokens(150, seed=10)
    ours = whole_prompt_logits(load_model(tmp_path, dtype=torch.float32, device="cpu"), tokens)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("variant", "scaling"),
    [("qwen2", YARN), ("qwen3", YARN | {"factor": 4.0}), ("llama", {"type": "linear", "factor": 3.0})],
)
def test_sequences_beyond_the_positions_that_a_scaling_stretches(
    variant: str, scaling: dict[str, object], tmp_path: Path
) -> None:
    reference = save_published(tmp_path, variant, rope_scaling=scaling, max_position_embeddings=64)
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    tokens = random_tokens(model.config.reachable_positions, seed=6)
    assert len(tokens) > 64
    (ours,) = forced_logits(model, [tokens], [100])
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=TOLERANCE, rtol=0)


def test_dynamic_scaling_is_none_up_to_the_models_positions(tmp_path: Path) -> None:
    reference = save_published(tmp_path, "llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    model = load_model(tmp_path, dtype=torch.float32, device="cpu")
    tokens = random_tokens(model.config.reachable_positions, seed=7)
    with torch.inference_mode():
        theirs = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(whole_prompt_logits(model, tokens), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("block_size", [1, 5, 16, 64])
def test_any_block_size_gives_the_same_logits(block_size: int, tmp_path: Path) -> None:
    tokens = random_tokens(50, seed=3)
    (ours,) = forced_logits(load(tmp_path, "mistral_sliding"), [tokens], [31], block_size=block_size)
    torch.testing.assert_close(ours, transformers_logits("mistral_sliding", tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "variant", ["llama", "mistral_sliding", "qwen2_sliding", "qwen3", "gemma3", "qwen3_moe", "gpt_oss", "gpt2"]
)
def test_greedy_generation_equals_transformers_generate(variant: str, tmp_path: Path) -> None:
    prompt, new_tokens = random_tokens(19, seed=7), 24
    reference = make_tiny_model(variant)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, pad_token_id=0,
        eos_token_id=VOCAB_SIZE + 1,
    )[0].tolist()  # fmt: skip
    (logits,) = forced_logits(load(tmp_path, variant), [expected], [len(prompt)])
    assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == expected[len(prompt) :]


@pytest.mark.parametrize(
    "rope",
    [
        YARN | {"attention_factor": 0.7},
        YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        YARN | {"beta_fast": 16.0, "truncate": False},
        {"rope_type": "default", "rope_theta": 500_000.0},
    ],
    ids=["attention_factor", "mscale", "no_truncate", "theta"],
)
def test_rope_options_equal_transformers(rope: dict[str, object], tmp_path: Path) -> None:
    tokens = random_tokens(300, seed=5)
    model = load(tmp_path, "llama_head_dim_16", rope_scaling=rope)
    theirs = transformers_logits("llama_head_dim_16", tokens, rope_scaling=rope)
    torch.testing.assert_close(whole_prompt_logits(model, tokens), theirs, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "variant", ["llama_biases", "qwen3_tied", "gemma2", "gemma3", "olmo2", "granite", "mixtral", "gpt_oss"]
)
def test_bfloat16_is_as_near_to_float32_as_transformers_bfloat16_is(variant: str, tmp_path: Path) -> None:
    tokens = random_tokens(90, seed=11)
    exact = transformers_logits(variant, tokens)
    with torch.inference_mode():
        theirs = make_tiny_model(variant).to(torch.bfloat16)(torch.tensor([tokens])).logits[0].float()
    (ours,) = forced_logits(load(tmp_path, variant, dtype=torch.bfloat16), [tokens], [50])
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().mean() < 1.3 * (theirs - exact).abs().mean()


@pytest.mark.parametrize(
    "variant",
    ["llama", "granite", "qwen3_moe", "deepseek_v3", "gemma", "gemma4", "olmo2", "gpt_oss", "qwen3_5", "afmoe"],
)
@torch.inference_mode()
def test_norms_round_in_bfloat16_where_those_of_transformers_do(variant: str, tmp_path: Path) -> None:
    """Before the weight or behind it: the order of a float32 sum may tip the last bit of very few."""
    x_TE = 3 * torch.randn(200, 48, generator=torch.Generator().manual_seed(0)).bfloat16()
    path = save_tiny_model(tmp_path, variant, dtype=torch.bfloat16)
    ours = load_model(path, dtype=torch.bfloat16, device="cpu").norm(x_TE)
    theirs = make_tiny_model(variant).to(torch.bfloat16).model.norm(x_TE)
    assert (ours != theirs).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kept", [[0], [0, 1, 7, 40], [40], [], list(range(41))], ids=len)
@pytest.mark.parametrize(
    "variant",
    [
        "llama_whole_panels",
        "mistral_sliding",
        "gemma2",
        "olmo2",
        "qwen3_moe",
        "qwen3_moe_whole_panels",
        "gpt_oss",
        "gpt2",
    ],
)
@torch.inference_mode()
def test_some_tokens_come_out_as_they_do_among_all(
    variant: str, kept: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    """One sequence decodes, one ends its prompt, one is in the midst of it."""
    model = load(tmp_path, variant, dtype)
    meta = make_metadata([(12, 13), (0, 7), (3, 36)], [[1, 2], [3], [4, 5, 6, 7, 8]], 8, num_decode_seqs=1)
    ids, positions = torch.tensor(random_tokens(41, seed=5)), torch.tensor([12, *range(7), *range(3, 36)])

    def run(indices: torch.Tensor | None) -> tuple[torch.Tensor, KVCache]:
        cache = KVCache.allocate(model.config, 9, 8, model.dtype, "cpu")
        generator = torch.Generator().manual_seed(0)
        for layer in (*cache.k, *cache.v):
            layer.copy_(torch.randn(layer.shape, generator=generator))
        return model(ids, positions, cache, meta, indices), cache

    (every, whole), (some, partial) = run(None), run(torch.tensor(kept, dtype=torch.int64))
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(some, every[kept], atol=tolerance, rtol=tolerance)
    for one, other in zip((*whole.k, *whole.v), (*partial.k, *partial.v), strict=True):
        assert torch.equal(one, other)
