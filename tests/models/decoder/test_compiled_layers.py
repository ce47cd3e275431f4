"""All layers in one compiled call, beside transformers and beside the same model op by op."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bulkrun.models.decoder import compiled_layers
from bulkrun.models.decoder.compiled_layers import compile_layers
from bulkrun.models.decoder.decoder import Decoder
from bulkrun.models.kv_cache import KVCache
from bulkrun.ops.cpu.layer_stack import MAX_COPIED_TOKENS, LayerStack
from bulkrun.ops.cpu.library import compiled_ops
from bulkrun.ops.matmul.fp8 import FP8, raw_bytes
from tests.models.load import load_model
from tests.models.paged_driver import allocate_states, assert_same_tokens, forced_logits, make_metadata, tolerance_of
from tests.models.tiny_models import VARIANTS, VOCAB_SIZE, make_tiny_model, save_tiny_model

pytestmark = pytest.mark.skipif(compiled_ops().library is None, reason="no compiled ops on this machine")

STACKED = [
    "llama_tied", "llama_mqa", "llama_biases", "llama_head_dim_80", "llama_rope_yarn", "mistral_sliding",
    "qwen2_sliding", "qwen3_sliding", "gemma", "phi3_partial_rotary", "smollm3_sliding", "granite_biases_tied",
    "gemma2", "gemma3", "olmo2", "olmo3", "qwen3_5", "qwen3_5_tied", "cohere", "cohere2", "apertus",
    "arcee_whole", "falcon", "falcon_new", "gpt_neox_whole", "nanochat", "nemotron", "olmo", "stablelm",
    "jamba_dense", "jamba_whole_panels", "nemotron_h_whole",
]  # fmt: skip
STATES_ALONE = ["falcon_mamba", "mamba2", "mamba_whole_panels"]
NOT_STACKED = [
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "qwen3_5_moe",
    "qwen3_next",
    "cohere_qk_norm",
    "arcee",
    "kimi_linear",
    "olmo_limit",
    "stablelm_beside",
    "starcoder2",
    "jamba",
    "mamba",
    "nemotron_h",
    "nemotron_h_moe",
]
DTYPES = [torch.float32, torch.bfloat16]
BLOCK_SIZE = 8
# either way is so far from the truth; rounding to bf16 at the same places, sums in another order
TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.08}
TOLERANCE_OF_GEMMA = {torch.float32: 1e-4, torch.bfloat16: 0.08}  # summed in eight lanes: 5.5e-5 from op by op
# of float64, in float32, are so far: the stack 1.1e-4, op by op 0.9e-4, transformers 1.4e-4
TOLERANCE_OF_STATES = {torch.float32: 3e-4, torch.bfloat16: 0.08}


def tolerances(variant: str) -> dict[torch.dtype, float]:
    if variant == "gemma":
        return TOLERANCE_OF_GEMMA
    return TOLERANCE_OF_STATES if variant.startswith("qwen3_5") else TOLERANCE


def load(tmp_path: Path, variant: str, dtype: torch.dtype, **changes: int) -> Decoder:
    model = load_model(save_tiny_model(tmp_path / variant, variant, **changes), dtype=dtype, device="cpu")
    assert isinstance(model, Decoder)
    if dtype == torch.bfloat16 and model.layer_stack is None:
        pytest.skip("this processor does not multiply bf16")
    return model


@contextmanager
def op_by_op(model: Decoder) -> Iterator[None]:
    stack, model.layer_stack = model.layer_stack, None
    yield
    model.layer_stack = stack


def random_tokens(length: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def prompt_logits(model: Decoder, tokens: list[int], kv_dtype: torch.dtype | None = None) -> torch.Tensor:
    table = list(range(1, 2 + len(tokens) // BLOCK_SIZE))
    cache = KVCache.allocate(model.config, len(table) + 1, BLOCK_SIZE, kv_dtype or model.dtype, "cpu")
    allocate_states(model, cache, 1)
    meta = make_metadata([(0, len(tokens))], [table], BLOCK_SIZE, num_decode_seqs=0)
    return model.compute_logits(model(torch.tensor(tokens), torch.arange(len(tokens)), cache, meta))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("variant", STACKED + STATES_ALONE)
def test_mixed_steps_are_as_good_as_op_by_op(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = load(tmp_path, variant, dtype)
    assert isinstance(model.layer_stack, LayerStack)
    prompt_lens, lens = [41, 1, 17, 9], [52, 20, 17, 30]
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lens)]
    ours = torch.cat(forced_logits(model, sequences, prompt_lens))
    with op_by_op(model):
        reference = torch.cat(forced_logits(model, sequences, prompt_lens))
    with torch.inference_mode():
        exact = torch.cat([make_tiny_model(variant)(torch.tensor([tokens])).logits[0] for tokens in sequences])
    tolerance = tolerances(variant)[dtype]
    torch.testing.assert_close(ours, reference, atol=tolerance, rtol=tolerance)
    if dtype == torch.float32:
        assert_same_tokens(ours, exact)
    else:
        assert (ours - exact).abs().mean() < 1.1 * (reference - exact).abs().mean()


@pytest.mark.parametrize(
    ("variant", "dtype", "kv_dtype"),
    [
        *[(variant, dtype, FP8) for variant in STACKED for dtype in DTYPES],
        *[(variant, torch.float32, torch.bfloat16) for variant in ("llama_mqa", "gemma3", "qwen3_5", "jamba_dense")],
    ],
    ids=str,
)
def test_a_narrower_cache_gives_what_op_by_op_gives_over_one(
    variant: str, dtype: torch.dtype, kv_dtype: torch.dtype, tmp_path: Path
) -> None:
    """Keys and values are equal or neighbours in the format, where sums in another order meet a tie."""
    model, outputs = load(tmp_path, variant, dtype), []
    assert model.layer_stack is not None and model.layer_stack.takes(model.embed_weight[:3], kv_dtype)
    prompt_lens, lens = [41, 1, 17, 9], [52, 20, 17, 30]
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lens)]
    for context in (nullcontext(), op_by_op(model)):
        with context:
            outputs.append(torch.cat(forced_logits(model, sequences, prompt_lens, kv_dtype=kv_dtype)))
    exact = torch.cat(forced_logits(model, sequences, prompt_lens))
    ours, reference = outputs
    assert (ours - reference).abs().mean() < 0.5 * (reference - exact).abs().mean()
    assert (ours - exact).abs().mean() < 1.1 * (reference - exact).abs().mean()


@pytest.mark.parametrize("sizes", [(64, 48), (64, 80), (64, 40), (48, 64), (48, 80), (96, 96)], ids=str)
@pytest.mark.parametrize(
    "variant", ["llama", "qwen3", "gemma", "gemma3", "olmo2", "qwen3_5", "cohere2", "stablelm", "jamba_dense"]
)
def test_sizes_of_whole_panels_and_others_in_one_layer_equal_transformers(
    variant: str, sizes: tuple[int, int], tmp_path: Path
) -> None:
    changes = {"hidden_size": sizes[0], "intermediate_size": sizes[1], "num_attention_heads": 4}
    reference = make_tiny_model(variant, **changes)
    model = load_model(save_tiny_model(tmp_path, variant, **changes), dtype=torch.float32, device="cpu")
    for length in (1, 19, MAX_COPIED_TOKENS + 9):
        tokens = random_tokens(length, seed=length)
        with torch.inference_mode():
            theirs = reference(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(prompt_logits(model, tokens), theirs, atol=tolerance_of(variant), rtol=0)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(
    "variant", ["llama_biases", "qwen3_5", "cohere2", "apertus", "gpt_neox_whole", "jamba_dense", *STATES_ALONE]
)
def test_any_number_of_tokens_and_threads_equals_transformers(variant: str, num_threads: int, tmp_path: Path) -> None:
    model, reference = load(tmp_path, variant, torch.float32), make_tiny_model(variant)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        for length in (1, 2, 15, 16, 17, 31, 33, MAX_COPIED_TOKENS - 1, MAX_COPIED_TOKENS, MAX_COPIED_TOKENS + 1):
            tokens = random_tokens(length, seed=length)
            with torch.inference_mode():
                theirs = reference(torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(prompt_logits(model, tokens), theirs, atol=tolerance_of(variant), rtol=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "variant",
    ["qwen3", "gemma3", "olmo2", "qwen3_5", "cohere2", "apertus", "falcon_new", "jamba_dense", "mamba_whole_panels"],
)
def test_two_threads_give_the_bits_of_one(
    variant: str, dtype: torch.dtype, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model, tokens, before = load(tmp_path, variant, dtype), random_tokens(77, seed=1), torch.get_num_threads()
    logits = []
    for num_threads in (1, 2):
        torch.set_num_threads(num_threads)
        logits.append(prompt_logits(model, tokens, kv_dtype))
    torch.set_num_threads(before)
    assert torch.equal(*logits)


def test_layers_of_many_inputs_are_near_transformers_in_float32(tmp_path: Path) -> None:
    """Rows and panels do not stay near together: they are multiplied in slices."""
    changes = {"hidden_size": 3200, "intermediate_size": 2176, "num_hidden_layers": 1}
    model, tokens = load(tmp_path, "qwen3", torch.bfloat16, **changes), random_tokens(300, seed=1)
    with torch.inference_mode():
        exact = make_tiny_model("qwen3", **changes)(torch.tensor([tokens])).logits[0]
    assert (prompt_logits(model, tokens) - exact).abs().mean() < 0.03, "found: 0.018, of 1.24 on average"


def decode_step(model: Decoder, poison: float, kv_dtype: torch.dtype | None = None) -> tuple[torch.Tensor, KVCache]:
    """Two sequences of 13 and 21 tokens decode one more; what is in no block of theirs holds `poison`."""
    generator = torch.Generator().manual_seed(0)
    cache = KVCache.allocate(model.config, 9, BLOCK_SIZE, kv_dtype or model.dtype, "cpu")
    meta = make_metadata([(13, 14), (21, 22)], [[1, 2], [5, 3, 4]], BLOCK_SIZE, num_decode_seqs=2)
    for layer in (*cache.k, *cache.v):
        layer.copy_(torch.randn(layer.shape, generator=generator))
        for block, first in ((2, 14 - BLOCK_SIZE), (4, 22 - 2 * BLOCK_SIZE), (6, 0), (8, 0)):
            raw_bytes(layer)[block, first:] = raw_bytes(torch.full((), poison).to(layer.dtype))
    meta = replace(meta, kv_copies=torch.tensor([[8, 9], [5 * BLOCK_SIZE, 7 * BLOCK_SIZE + 1]]))
    with torch.inference_mode():
        hidden = model(torch.tensor([7, 8]), torch.tensor([13, 21]), cache, meta)
    return hidden, cache


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_stands_in_unused_slots_does_not_matter(
    dtype: torch.dtype, kv_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    model = load(tmp_path, "smollm3_sliding", dtype)
    (clean, _), (poisoned, _) = (decode_step(model, poison, kv_dtype) for poison in (0.0, torch.nan))
    assert torch.equal(clean, poisoned) and not clean.isnan().any()


@pytest.mark.parametrize("kv_dtype", [None, FP8, torch.bfloat16], ids=str)
def test_slots_are_copied_before_anybody_attends(kv_dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = load(tmp_path, "llama", torch.float32)
    ours, our_cache = decode_step(model, 0.0, kv_dtype)
    with op_by_op(model):
        reference, cache = decode_step(model, 0.0, kv_dtype)
    torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    caches = [map(raw_bytes, (*of.k, *of.v)) for of in (our_cache, cache)]
    for one, other in zip(*caches, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
        assert torch.equal(one[5, 0], one[1, 0]) and torch.equal(one[7, 1], one[1, 1])


def test_a_cache_of_another_dtype_goes_op_by_op(tmp_path: Path) -> None:
    model = load(tmp_path, "llama", torch.float32)
    assert model.layer_stack is not None
    embeds_TE = torch.zeros(3, model.config.hidden_size)
    assert model.layer_stack.takes(embeds_TE, torch.float32) and model.layer_stack.takes(embeds_TE, FP8)
    assert model.layer_stack.takes(embeds_TE, torch.bfloat16) and not model.layer_stack.takes(embeds_TE, torch.float16)


@pytest.mark.parametrize("variant", NOT_STACKED)
def test_families_with_other_layers_go_op_by_op(variant: str, tmp_path: Path) -> None:
    assert variant in VARIANTS
    path = save_tiny_model(tmp_path / variant, variant)
    model = load_model(path, dtype=torch.float32, device="cpu")
    assert isinstance(model, Decoder) and model.layer_stack is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("variant", ["llama_whole_panels", "jamba_whole_panels", "mamba_whole_panels"])
def test_steps_of_any_width_share_the_panels_of_the_products(
    variant: str, num_threads: int, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "_MAX_COPIED_BYTES", 0)
    model, before = load(tmp_path, variant, dtype), torch.get_num_threads()
    if model.lm_head.weight.ndim == 2:
        pytest.skip("this processor has no AVX-512")
    assert model.layer_stack is not None
    reference = make_tiny_model(variant)
    torch.set_num_threads(num_threads)
    try:
        for length in (1, 16, 33, 127, 129, 255, 256, 257, 400, 511):
            tokens = random_tokens(length, seed=length)
            ours = prompt_logits(model, tokens)
            with op_by_op(model):
                one_by_one = prompt_logits(model, tokens)
            with torch.inference_mode():
                exact = reference(torch.tensor([tokens])).logits[0]
            torch.testing.assert_close(ours, one_by_one, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            assert (ours - exact).abs().mean() < 1.1 * (one_by_one - exact).abs().mean() + 1e-3
    finally:
        torch.set_num_threads(before)


def test_large_models_are_not_held_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(tmp_path, "llama", torch.float32)
    monkeypatch.setattr(compiled_layers, "_MAX_COPIED_BYTES", 1000)
    assert compile_layers(model) is None


def test_the_references_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BULKRUN_CPU_OPS", "reference")
    compiled_ops.cache_clear()
    try:
        model = load(tmp_path, "llama", torch.float32)
    finally:
        compiled_ops.cache_clear()
    assert model.layer_stack is None
